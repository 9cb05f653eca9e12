"""Lightly's own MoCo into one around any backbone, by the order of its tensors; ``formats.py`` reads it by names."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from moco_plugins import MoCo

from .formats import LAYOUTS


def load_lightly_checkpoint(model: nn.Module, checkpoint: str | PathLike[str] | Mapping[str, Any]) -> None:
    """Load query and key encoder of lightly's MoCo into ``model``.

    lightly keeps its memory bank out of the checkpoint, so the queue starts fresh; a warning says so. The optimiser's
    state is not taken over.

    Args:
        model: a :class:`moco_plugins.MoCo`, or a module with one as ``model.moco``, of the same architecture. The backbone's
            parameters may go by other names (lightly's example wraps the layers of a ResNet in a Sequential), as long as
            they come in the same order.
        checkpoint: a path (read with ``weights_only=True``), or what was read from one.

    Raises:
        TypeError: ``model`` has no MoCo.
        ValueError: the checkpoint is of another format, or of another architecture.
    """
    moco = model if isinstance(model, MoCo) else getattr(model, "moco", None)
    if not isinstance(moco, MoCo):
        raise TypeError(f"model is a {type(model).__name__}; it must be a moco_plugins.MoCo or have one as model.moco")
    read = checkpoint if isinstance(checkpoint, Mapping) else torch.load(checkpoint, "cpu", weights_only=True)
    weights: Mapping[str, Any] = read.get("state_dict", read)
    names = next((f for f in LAYOUTS if all(any(k.startswith(prefix) for k in weights) for prefix in f)), None)
    if names is None:
        raise ValueError(
            f"checkpoint: its names, such as {list(weights)[:3]}, are not those of lightly's MoCo, which are "
            f"{', '.join(name + '*' for name in LAYOUTS[0])}; for other MoCo code see "
            "moco_plugins.checkpoints.load_foreign_checkpoint"
        )
    own = moco.state_dict()
    targets = (
        "query_encoder.backbone.",
        "query_encoder.projector.",
        "key_encoder.backbone.",
        "key_encoder.projector.",
    )
    loaded: dict[str, Tensor] = {}
    for theirs, ours in zip(names, targets, strict=True):
        loaded |= _matched(_part(weights, theirs), _part(own, ours), theirs, ours)
    # It has trained: the key encoder is its own and not a copy to be made at the first step.
    loaded["steps"] = torch.tensor(max(1, int(read.get("global_step", 1))))
    moco.load_state_dict({**own, **loaded})
    if moco.queue is not None:
        warnings.warn(
            "lightly's checkpoints hold no queue: it starts fresh, and the loss is off until "
            f"{moco.queue.size} keys have passed; save and load moco-plugins' own checkpoints to keep it",
            stacklevel=2,
        )


def _part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def _matched(theirs: dict[str, Tensor], ours: dict[str, Tensor], prefix: str, target: str) -> dict[str, Tensor]:
    """Their tensors under our names: in order, which must agree in number and shapes."""
    if set(theirs) == set(ours):
        theirs = {name: theirs[name] for name in ours}
    pairs = list(zip(ours, theirs.items(), strict=False))
    wrong = [
        f"{prefix}{name} is {tuple(value.shape)} and {target}{own} {tuple(ours[own].shape)}"
        for own, (name, value) in pairs
        if value.shape != ours[own].shape
    ]
    if len(theirs) != len(ours):
        wrong.insert(0, f"{prefix}* has {len(theirs)} tensors and {target}* {len(ours)}")
    if wrong:
        raise ValueError(
            f"checkpoint: it does not fit this MoCo: {'; '.join(wrong[:3])}. Build MoCo with the backbone of the checkpoint, "
            "and the hidden_dim and projection_dim of its MoCoProjectionHead"
        )
    return {target + own: value for own, (_, value) in pairs}
