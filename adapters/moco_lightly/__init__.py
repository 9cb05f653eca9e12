"""MoCo for lightly and Lightning: a loss, a LightningModule, and lightly's other methods for comparison.

    from moco_lightly import MoCoLoss       # in place of NTXentLoss(memory_bank_size=...)
    from moco_lightly import MoCoModule     # a LightningModule around any backbone

Importing this package imports neither framework; the names below do when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoints import load_lightly_checkpoint
    from .loss import MoCoLoss
    from .methods import BYOL, DINO, NNCLR, BarlowTwins, SimCLR, SimSiam, SwAV, VICReg
    from .module import MoCoModule, lightning_module_class

_WHERE = {
    "MoCoLoss": "loss",
    "MoCoModule": "module",
    "lightning_module_class": "module",
    "load_lightly_checkpoint": "checkpoints",
    **dict.fromkeys(("BYOL", "DINO", "NNCLR", "BarlowTwins", "SimCLR", "SimSiam", "SwAV", "VICReg"), "methods"),
}
__all__ = [
    "BYOL",
    "DINO",
    "NNCLR",
    "BarlowTwins",
    "MoCoLoss",
    "MoCoModule",
    "SimCLR",
    "SimSiam",
    "SwAV",
    "VICReg",
    "lightning_module_class",
    "load_lightly_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
