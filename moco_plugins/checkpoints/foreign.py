"""What version 0.1.0 had for other people's MoCo, on top of :func:`moco_plugins.checkpoints.load`."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .loading import load

if TYPE_CHECKING:
    from ..core.moco import MoCo


def load_foreign_checkpoint(moco: MoCo, checkpoint: str | PathLike[str] | Mapping[str, Any]) -> list[str]:
    """Load a checkpoint of any known format into ``moco``: ``load(checkpoint).load_into(moco)``.

    The optimiser's state is not taken over. Returns the names in the checkpoint that have no place here.

    Args:
        moco: built with the same backbone, variant, projection_dim and queue size.
        checkpoint: a path (read with ``weights_only=True``), or what was read from one.

    Raises:
        ValueError: the checkpoint is of no known format, or does not fit; the message says what differs.
    """
    return list(load(checkpoint).load_into(moco))


def translate(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    """Return a checkpoint's tensors under the names of ``MoCo.state_dict()``, and the names that have none."""
    weights = load(checkpoint)
    places = {
        "query_encoder.backbone": weights.backbone,
        "query_encoder.projector": weights.projector,
        "predictor": weights.predictor,
        "key_encoder.backbone": weights.key_backbone,
        "key_encoder.projector": weights.key_projector,
    }
    state = {f"{place}.{name}": value for place, part in places.items() for name, value in part.items()}
    if weights.queue is not None:
        filled = len(weights.queue) if weights.queue_filled is None else weights.queue_filled
        state |= {"queue.keys": weights.queue, "queue.filled": torch.tensor(filled)}
        state["queue.ptr"] = torch.tensor(weights.queue_ptr)
    if weights.key_backbone:
        state["steps"] = torch.tensor(max(1, weights.steps or 0))  # has trained: the key encoder is its own
    return state, list(weights.left)
