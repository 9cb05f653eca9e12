"""Sizes that are (height, width) work wherever a size does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moco_plugins import TwoViews
from moco_plugins.backbones import build_backbone
from moco_plugins.bench.plan.data import load_data
from moco_plugins.bench.plan.presets import preset_for
from moco_plugins.core.views import AffineViews
from moco_plugins.data.arrays import ImageArray
from moco_plugins.data.images import as_batch
from moco_plugins.sizes import as_size, at_most, parse_size, sides, written


def wide() -> ImageArray:
    generator = torch.Generator().manual_seed(0)
    return ImageArray(torch.randint(0, 256, (12, 3, 32, 128), dtype=torch.uint8, generator=generator), torch.arange(12))


def test_reading_and_writing() -> None:
    assert sides("size", 7) == (7, 7)
    assert sides("size", [32, 128]) == (32, 128)
    assert (as_size(7, 7), as_size(32, 128)) == (7, (32, 128))
    assert (parse_size("224"), parse_size("32x128")) == (224, (32, 128))
    assert written(32) == "32 x 32"
    assert written((32, 128)) == "32 x 128"
    assert (at_most(100, 50), at_most((32, 128), 64), at_most((32, 128), 500)) == (50, (16, 64), (32, 128))


@pytest.mark.parametrize("bad", [(1, 2, 3), 2.5, "32", None, True], ids=str)
def test_what_is_no_size(bad: object) -> None:
    with pytest.raises(TypeError, match=r"image_size=.*\(height, width\)"):
        sides("image_size", bad)  # type: ignore[arg-type]


def test_a_set_of_wide_images_is_not_cut_to_squares() -> None:
    images = wide()
    assert images.image_size == (32, 128)
    batch, _ = as_batch(images, [0, 1], images.image_size)
    assert torch.equal(batch, images.images[:2].float() / 255)


def test_images_are_scaled_to_cover_and_their_middle_is_cut_out() -> None:
    image = torch.zeros(1, 3, 40, 40, dtype=torch.uint8)
    image[:, :, 15:25] = 255  # a bright band across the middle
    batch, _ = as_batch(ImageArray(image, None), [0], (20, 80))
    assert batch.shape == (1, 3, 20, 80)
    assert float(batch.min()) > 0.7  # doubled, the band is 20 pixels high


@pytest.mark.parametrize("views", [TwoViews("v2", (32, 128)), AffineViews((32, 128))], ids=["papers", "affine"])
def test_views(views: object) -> None:
    first, second = views(torch.rand(2, 3, 50, 60))  # type: ignore[operator]
    assert first.shape == second.shape == (2, 3, 32, 128)


@pytest.mark.parametrize("name", ["convnet", "resnet18-cifar"])
def test_backbones(name: str) -> None:
    backbone, width = build_backbone(name, 3, (32, 128))
    features: Tensor = backbone(torch.zeros(2, 3, 32, 128))
    assert features.shape == (2, width)


def test_a_backbone_that_takes_squares_says_so() -> None:
    with pytest.raises(ValueError, match=r"vit_b_16.*squares, not 32 x 128.*timm"):
        build_backbone("vit_b_16", 3, (32, 128))


def test_presets_go_by_the_longer_side() -> None:
    assert preset_for(1, (28, 28), 1000) == preset_for(1, 28, 1000)
    assert preset_for(3, (32, 128), 1000) == preset_for(3, 128, 1000)


def test_the_harness_takes_wide_images_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from moco_plugins.hooks import manager

    monkeypatch.setattr(manager, "dataset_factory", lambda name: lambda root: (wide(), wide()))
    monkeypatch.setattr(manager, "datasets", lambda: {"wide": None})
    assert load_data("wide", None, None, 5).image_size == (32, 128)
    assert load_data("wide", None, 16, 5).image_size == 16
