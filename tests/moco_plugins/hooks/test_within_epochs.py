"""Epochs that begin in their middle, for engines that resume there (tests/adapters/test_every_adapter.py)."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from moco_plugins.core.views import AffineViews
from moco_plugins.data.datasets import digits
from moco_plugins.data.loader import EpochBatches, make_loader
from moco_plugins.hooks.engine import begins_anywhere


def test_loaders_that_cannot_begin_within_an_epoch_are_known() -> None:
    images = digits(None)[0].subset(range(160))
    assert begins_anywhere(make_loader(images, AffineViews(), lambda x: x, 32, seed=5))
    assert not begins_anywhere(DataLoader(images, 32))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_begins_in_its_middle_has_the_batches_of_the_whole_one(workers: int) -> None:
    images = digits(None)[0].subset(range(96))
    loader = make_loader(images, AffineViews(), lambda x: x, 32, seed=5, workers=workers)
    batches = loader.batch_sampler
    assert isinstance(batches, EpochBatches)
    batches.set_epoch(1)
    whole = list(loader)
    batches.set_epoch(1, 2)
    (rest,) = list(loader)
    assert len(loader) == 3
    assert torch.equal(rest[0][0], whole[2][0][0])
    batches.set_epoch(1)
    assert len(list(loader)) == 3
