"""Views of images: what they are drawn from (recipes, draws), how they are made (space, colour, render), and the transforms."""

from .affine import AffineViews
from .two_views import IMAGENET_MEAN, IMAGENET_STD, TwoViews

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "AffineViews", "TwoViews"]
