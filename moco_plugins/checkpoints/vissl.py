"""facebookresearch/vissl: parameters nested in ``classy_state_dict``, the key encoder in the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .formats import Format
from .reading import Content
from .weights import Weights


def read(content: Content) -> Weights | None:
    """A whole checkpoint, or what its scripts extract: ``model_state_dict`` with ``_feature_blocks.`` names."""
    whole = content.raw.get("classy_state_dict")
    if not isinstance(whole, Mapping):
        if not content.has("_feature_blocks."):
            return None
        return Weights("", content.take("_feature_blocks."))
    model = _at(whole, "base_model", "model")
    trunk, heads = _tensors(_at(model, "trunk")), _tensors(_at(model, "heads"))
    loss = _tensors(_at(whole, "loss")) or _tensors(_at(content.raw, "loss"))
    key = _under(loss, "moco_encoder.")
    queue, ptr = loss.get("queue"), loss.get("queue_ptr")
    steps, epoch = content.raw.get("iteration"), whole.get("train_phase_idx")
    return Weights(
        "",
        trunk,
        heads,
        key_backbone=_under(key, "trunk."),
        key_projector=_under(key, "heads."),
        queue=None if queue is None else queue.T.contiguous(),
        queue_ptr=0 if ptr is None else int(ptr),
        left=tuple(f"loss.{name}" for name in loss if not name.startswith(("moco_encoder.", "queue"))),
        steps=steps if isinstance(steps, int) else None,
        about={"epoch": epoch} if isinstance(epoch, int) else {},
    )


def _at(mapping: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    for key in keys:
        inner = mapping.get(key)
        mapping = inner if isinstance(inner, Mapping) else {}
    return mapping


def _tensors(mapping: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in mapping.items() if isinstance(value, Tensor)}


def _under(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


FORMATS = {"vissl": Format("facebookresearch/vissl", read)}
