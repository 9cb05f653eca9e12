"""The two-view transforms: the public name of :mod:`moco_plugins.core.views`."""

from .core.views import IMAGENET_MEAN, IMAGENET_STD, AffineViews, TwoViews

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "AffineViews", "TwoViews"]
