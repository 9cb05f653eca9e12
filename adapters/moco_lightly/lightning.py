"""MoCoModule and TwoViewData for ``import lightning``."""

from lightning.pytorch import LightningDataModule, LightningModule

from .data import TwoViewDataBody
from .module import MoCoBody


class MoCoModule(MoCoBody, LightningModule):
    """See :class:`moco_lightly.module.MoCoBody`."""


class TwoViewData(TwoViewDataBody, LightningDataModule):
    """See :class:`moco_lightly.data.TwoViewDataBody`."""


__all__ = ["MoCoModule", "TwoViewData"]
