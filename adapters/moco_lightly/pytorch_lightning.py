"""MoCoModule and TwoViewData for ``import pytorch_lightning``."""

from pytorch_lightning import LightningDataModule, LightningModule

from .data import TwoViewDataBody
from .module import MoCoBody


class MoCoModule(MoCoBody, LightningModule):
    """See :class:`moco_lightly.module.MoCoBody`."""


class TwoViewData(TwoViewDataBody, LightningDataModule):
    """See :class:`moco_lightly.data.TwoViewDataBody`."""


__all__ = ["MoCoModule", "TwoViewData"]
