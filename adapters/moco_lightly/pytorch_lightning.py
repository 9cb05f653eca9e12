"""MoCoModule for ``import pytorch_lightning``."""

from pytorch_lightning import LightningModule

from .module import MoCoBody


class MoCoModule(MoCoBody, LightningModule):
    """See :class:`moco_lightly.module.MoCoBody`."""


__all__ = ["MoCoModule"]
