"""The default parts, registered through the same hooks as everybody's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from .checkpoints import Format
from .checkpoints.builtin import FORMATS
from .core.contrast import ContrastiveLoss, check_options
from .core.infonce import info_nce
from .core.key_queue import KeyQueue
from .core.losses.debiased import debiased
from .core.losses.decoupled import decoupled
from .core.losses.hard import hard
from .core.losses.mochi import mochi
from .core.losses.ressl import ressl
from .core.losses.supcon import supcon
from .core.moco import MoCo
from .core.momentum import MomentumRule, ema
from .core.sharded_queue import ShardedKeyQueue
from .core.views import AffineViews, TwoViews
from .data.datasets import DATASETS
from .hooks.specs import hookimpl
from .sizes import Size

#: The names that each building hook answers to here.
PARTS = {
    "moco_build_queue": ("ring", "sharded"),
    "moco_build_momentum": ("ema",),
    "moco_build_loss": ("info_nce", "decoupled", "debiased", "hard", "mochi", "supcon", "ressl"),
    "moco_build_views": ("v1", "v2", "v2+", "v3", "affine"),
}


@hookimpl
def moco_build_queue(name: str, size: int, dim: int, options: Mapping[str, Any]) -> KeyQueue | None:
    """The ring of the newest K keys, whole on each rank or shared out among them."""
    kinds: dict[str, type[KeyQueue]] = {"ring": KeyQueue, "sharded": ShardedKeyQueue}
    return kinds[name](size, dim, **options) if name in kinds else None


@hookimpl
def moco_build_momentum(name: str, options: Mapping[str, Any]) -> MomentumRule | None:
    """The exponential moving average of the paper."""
    return partial(ema, **options) if name == "ema" else None


_LOSSES: dict[str, Callable[..., Any]] = {
    "info_nce": info_nce,
    "decoupled": decoupled,
    "debiased": debiased,
    "hard": hard,
    "mochi": mochi,
    "supcon": supcon,
    "ressl": ressl,
}


@hookimpl
def moco_build_loss(name: str, options: Mapping[str, Any]) -> ContrastiveLoss | None:
    """InfoNCE and its relatives, fused where they can be."""
    if name not in _LOSSES:
        return None
    check_options(name, _LOSSES[name], options)
    return partial(_LOSSES[name], **options)


@hookimpl
def moco_build_views(name: str, image_size: Size, options: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """The papers' views, and batched affine ones."""
    if name == "affine":
        return AffineViews(image_size, **options)
    return TwoViews(name, image_size, **options) if name in ("v1", "v2", "v2+", "v3") else None


def _moco(variant: str) -> Callable[..., nn.Module]:
    # A partial, not a closure: the harness reads a factory's options from its signature.
    return partial(MoCo, variant=variant)


@hookimpl
def moco_methods() -> Mapping[str, Callable[..., nn.Module]]:
    """The MoCo family."""
    return {"moco-v1": _moco("v1"), "moco-v2": _moco("v2"), "moco-v2+": _moco("v2+"), "moco-v3": _moco("v3")}


@hookimpl
def moco_datasets() -> Mapping[str, Callable[..., Any]]:
    """Embedded data sets, and torchvision's by name."""
    return DATASETS


@hookimpl
def moco_checkpoint_formats() -> Mapping[str, Format]:
    """The formats that need no framework."""
    return FORMATS
