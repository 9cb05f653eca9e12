"""lightly's methods, each built of lightly's own losses and heads, with the settings of lightly's benchmarks.

All are :class:`moco_plugins.hooks.method.Method`: ``method(views) -> loss``, ``embed``, ``metrics``. The settings are those of
``benchmarks/imagenet/resnet50`` in lightly's repository; methods that are not there (SimSiam, NNCLR) have those of its
CIFAR-10 benchmark where that differs from the head's own defaults.
"""

from .clusters import SwAV
from .joint import BarlowTwins, SimCLR, VICReg
from .predictors import NNCLR, SimSiam
from .teachers import BYOL, DINO

__all__ = ["BYOL", "DINO", "NNCLR", "BarlowTwins", "SimCLR", "SimSiam", "SwAV", "VICReg"]
