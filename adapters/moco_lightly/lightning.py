"""MoCoModule for ``import lightning``."""

from lightning.pytorch import LightningModule

from .module import MoCoBody


class MoCoModule(MoCoBody, LightningModule):
    """See :class:`moco_lightly.module.MoCoBody`."""


__all__ = ["MoCoModule"]
