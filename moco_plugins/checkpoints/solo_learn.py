"""vturrisi/solo-learn: MoCo v2+ with a queue for each view, and MoCo v3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .architectures import Architecture
from .authors import SMALL_HEADS
from .formats import Format
from .reading import Content
from .weights import Weights


def read(content: Content) -> Weights | None:
    """A Lightning checkpoint of ``mocov2plus`` or ``mocov3``; the classifiers trained beside them are left out."""
    if not content.has("backbone.", "momentum_backbone.", "projector.", "momentum_projector."):
        return None
    backbone = content.take("backbone.")
    queue, ptr = content.pop("queue"), content.pop("queue_ptr")
    predictor = content.take("predictor.")
    step = content.raw.get("global_step")
    return Weights(
        "",
        backbone,
        content.take("projector."),
        predictor,
        content.take("momentum_backbone."),
        content.take("momentum_projector."),
        queue=None if queue is None else _one_queue(queue, 0 if ptr is None else int(ptr)),
        steps=step if isinstance(step, int) else None,
        architecture=_network(backbone, bool(predictor)),
        about={"epoch": content.raw["epoch"]} if isinstance(content.raw.get("epoch"), int) else {},
        notes=() if queue is None else ("solo-learn keeps a queue for each view; here both are one, twice as long",),
    )


def _one_queue(queue: Tensor, ptr: int) -> Tensor:
    """(2, D, K), to be written next at ``ptr`` -> (2 K, D) from the oldest keys to the newest, both views in turn."""
    views, dim, size = queue.shape
    return torch.roll(queue, -ptr, 2).permute(2, 0, 1).reshape(views * size, dim).contiguous()


def _network(backbone: Mapping[str, Tensor], v3: bool) -> Architecture | None:
    """What the shapes do not tell: the small stem pads by 2, and the small vision transformer of MoCo v3 has 12 heads."""
    options: dict[str, Any] = {}
    if "conv1.weight" in backbone and backbone["conv1.weight"].shape[-1] == 3:
        options["stem_padding"] = 2
    if v3 and "cls_token" in backbone and backbone["cls_token"].shape[-1] == 384:
        options["num_heads"] = SMALL_HEADS
    return Architecture("", options=options) if options else None


FORMATS = {"solo-learn": Format("vturrisi/solo-learn (mocov2plus, mocov3)", read)}
