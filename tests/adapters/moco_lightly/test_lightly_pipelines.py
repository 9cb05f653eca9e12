"""Parts of lightly and ours in one pipeline: loss in a user's LightningModule, transforms either way, lightly's example."""

from __future__ import annotations

import copy
import math
import runpy
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import MoCoV1Transform, MoCoV2Transform
from moco_lightly import MoCoLoss, lightning_module_class
from moco_lightly.data import lightly_datasets
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms.functional import to_pil_image

from moco_plugins import TwoViews
from moco_plugins.hooks import manager as plugins


class LightlyModule(pl.LightningModule):
    """lightly's Lightning example with one line changed."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.projection_head = MoCoProjectionHead(32, 32, 16)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = MoCoLoss(memory_bank_size=(100, 16))  # was: NTXentLoss(memory_bank_size=(100, 16))
        self.losses = []

    def training_step(self, batch, batch_idx):
        update_momentum(self.backbone, self.backbone_momentum, m=0.99)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.99)
        loss = self._loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        before = copy.deepcopy(self.criterion.state_dict())
        self._loss(batch)
        assert all(torch.equal(value, before[key]) for key, value in self.criterion.state_dict().items())

    def _loss(self, batch):
        x_query, x_key = batch[0]
        key = self.projection_head_momentum(self.backbone_momentum(x_key)).detach()
        return self.criterion(self.projection_head(self.backbone(x_query)), key)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


def digit_views(count: int = 160) -> DataLoader:
    digits, _ = plugins.dataset_factory("digits")(None)
    images = digits.images[:count].float() / 255
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    items = [([image, image + 0.2 * n], 0) for image, n in zip(images, noise, strict=True)]
    return DataLoader(items, 32)


def fit(module, loader, epochs=2, ckpt_path=None, val=None, **options):
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, **{**quiet, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, val, ckpt_path=ckpt_path)
    return trainer


def lightly_module() -> LightlyModule:
    torch.manual_seed(0)
    return LightlyModule()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_in_lightlys_example(accumulate, tmp_path):
    """Validation and sanity check change nothing, accumulated batches enter at the step, a resumed run is the same run."""
    loader, options = digit_views(), {"accumulate_grad_batches": accumulate, "val": digit_views(64)}
    whole = lightly_module()
    keep = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    fit(whole, loader, 4, callbacks=[keep], enable_checkpointing=True, **options)
    again = lightly_module()
    fit(again, loader, 4, ckpt_path=str(tmp_path / "epoch=1.ckpt"), **options)
    assert whole.losses[10:] == again.losses
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))
    assert int(whole.criterion.queue.filled) == 100


@pytest.mark.parametrize("transform", [MoCoV1Transform, MoCoV2Transform, TwoViews], ids=lambda t: t.__name__)
def test_transforms_are_interchangeable(transform):
    """lightly's and ours make the same kind of views, from the same pictures, for the same module."""
    views = transform("v2", 32) if transform is TwoViews else transform(32)
    picture = to_pil_image(torch.randint(0, 256, (3, 40, 40), dtype=torch.uint8))
    first, second = views(picture)
    assert first.shape == second.shape == (3, 32, 32)
    assert first.dtype == second.dtype == torch.float32
    assert not torch.equal(first, second)

    images, _ = plugins.dataset_factory("mnist5k")(None)
    train, _ = lightly_datasets("mnist5k")
    train.dataset.images = images.subset(torch.arange(32))
    train.transform = lambda image: views(image.convert("RGB"))
    module = lightning_module_class("pytorch_lightning")("convnet", image_size=32, queue_size=16, projection_dim=8)
    fit(module, DataLoader(train, 16), epochs=1)
    assert module.moco.steps == 2


def test_views_of_both_are_normalised_alike():
    """On a picture of one colour nothing but the colours differs; as they are, the views are equal."""
    grey = to_pil_image(torch.full((3, 40, 40), 128, dtype=torch.uint8))
    theirs, _ = MoCoV2Transform(32, cj_prob=0, random_gray_scale=0)(grey)
    ours = TwoViews("v2", 32)
    ours.recipes = tuple(replace(recipe, jitter_p=0, grey_p=0) for recipe in ours.recipes)
    torch.testing.assert_close(ours(grey)[0], theirs, atol=1e-5, rtol=0)


def test_lightlys_data_sets():
    train, test = lightly_datasets("mnist5k", lambda image: (image.size, image.mode))
    assert train[0][0] == ((28, 28), "L")
    assert train[0][2] == "0"
    assert (len(train), len(test)) == (4000, 1000)
    with pytest.raises(LookupError, match="mnist5k"):
        lightly_datasets("no such set")


def test_side_by_side_with_lightly():
    """The benchmark: the same losses as lightly's example to the digits printed, with less memory."""
    path = Path(__file__).parents[2] / "benchmarks" / "side_by_side_lightly.py"
    main = runpy.run_path(str(path), run_name="side_by_side_lightly")["main"]
    theirs, ours, split = main(["--steps", "5", "--batch-size", "64", "--json"])
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert ours["knn_top1"] == pytest.approx(theirs["knn_top1"], abs=0.01)
    assert ours["step_mib"] < theirs["step_mib"]
    assert math.isfinite(split["loss"])


class Photographs(torch.utils.data.Dataset):
    """Pictures of different sizes."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return to_pil_image(torch.randint(0, 256, (3, 30 + index, 50), dtype=torch.uint8)), index % 3


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", ["in memory", "photographs"])
def test_our_views_are_made_of_whole_batches_by_the_data_module(kind, workers, monkeypatch):
    """Of images in memory all of it, of others what comes after the crop, which hands on bytes."""
    from moco_lightly.pytorch_lightning import MoCoModule, TwoViewData

    digits = plugins.dataset_factory("digits")(None)[0].subset(torch.arange(12))
    images = digits if kind == "in memory" else Photographs()
    monkeypatch.setattr("moco_lightly.data.plugins.dataset_factory", lambda name: lambda root: (images, images))
    seen = []

    class Watched(TwoViewData):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            views = super().on_after_batch_transfer(batch, dataloader_idx)
            if self.trainer.training:
                parts = batch[0] if isinstance(batch[0], list) else [batch[0]]
                seen.append(([part.dtype for part in parts], [view.dtype for view in views[0]], views[0][0].shape))
            return views

    data = Watched("some", TwoViews("v2", 16), batch_size=6, image_size=16, workers=workers)
    channels = 1 if kind == "in memory" else 3
    module = MoCoModule("convnet", channels=channels, image_size=16, queue_size=16, projection_dim=8)
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(module, data)
    assert module.moco.steps == 2
    bytes_ = [torch.uint8] if kind == "in memory" else [torch.uint8] * 2
    assert seen == [(bytes_, [torch.float32] * 2, (6, channels, 16, 16))] * 2
