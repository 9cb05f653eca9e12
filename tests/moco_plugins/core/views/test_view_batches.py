"""Views of a batch at once, and in two halves: cut out one by one, finished together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from moco_plugins import TwoViews

VARIANTS = ["v1", "v2", "v2+", "v3"]


def photograph(height: int = 60, width: int = 80, seed: int = 0, mode: str = "RGB") -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("channels", [1, 2, 3, 13])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_batch_gives_two_batches(variant: str, channels: int, dtype: torch.dtype) -> None:
    top = 1 if dtype.is_floating_point else torch.iinfo(dtype).max
    images = (torch.rand(5, channels, 20, 30).double() * top).to(dtype)
    before = images.clone()
    first, second = TwoViews(variant, (16, 24), mean=(), std=())(images)
    for views in (first, second):
        assert views.shape == (5, channels, 16, 24)
        assert views.dtype == torch.float32
        assert 0 - 1e-5 <= float(views.min()) <= float(views.max()) <= 1 + 1e-5
        assert float(views.std()) > 0.02
    assert not torch.equal(first, second)
    assert torch.equal(images, before)


def test_each_image_of_a_batch_has_parameters_of_its_own() -> None:
    same = torch.rand(1, 3, 32, 32).expand(64, -1, -1, -1)
    first, second = TwoViews("v2", 32)(same)
    assert len({tuple(view.flatten()[:3].tolist()) for view in torch.cat([first, second])}) == 128


def test_a_batch_is_not_changed_by_who_else_is_in_it() -> None:
    # Only the random numbers count: with nothing random, each image comes out as by itself.
    views = TwoViews("v2", 24)
    views.recipes = (
        replace(views.recipes[0], scale=(1, 1), ratio=(1, 1), jitter_p=0, grey_p=0, blur_p=0, flip_p=0),
    ) * 2
    images = torch.rand(7, 3, 24, 24)
    for first, second, image in zip(*views(images), images, strict=True):
        for view in (first, second, views(image)[0]):
            assert torch.allclose(view, (image - torch.tensor([0.485, 0.456, 0.406])[:, None, None])
                                  / torch.tensor([0.229, 0.224, 0.225])[:, None, None], atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("batched", [False, True], ids=["one by one", "batched"])
def test_batches_follow_the_seed(batched: bool) -> None:
    views, images = TwoViews("v3", 16), torch.randint(0, 256, (6, 3, 20, 20), dtype=torch.uint8)

    def make() -> torch.Tensor:
        torch.manual_seed(5)
        return torch.cat(views(images)) if batched else torch.cat([torch.stack(views(image)) for image in images])

    assert torch.equal(make(), make())


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "LA"])
def test_crops_of_8_bit_images_are_bytes(mode: str) -> None:
    image = photograph(mode=mode)
    views = TwoViews("v2", (24, 32))
    for crop in views.crop(image):
        assert crop.dtype == torch.uint8
        assert crop.shape == (len(mode), 24, 32)
    tensor = torch.from_numpy(np.array(image)).reshape(60, 80, -1).permute(2, 0, 1)
    torch.manual_seed(1)
    first = views.crop(image)
    torch.manual_seed(1)
    assert all(torch.equal(a, b) for a, b in zip(first, views.crop(tensor), strict=True))


@pytest.mark.parametrize(
    "image", [torch.rand(3, 30, 30), torch.randint(0, 60000, (1, 30, 30)).to(torch.uint16)], ids=["float", "16 bit"]
)
def test_crops_of_other_images_are_floats_from_0_to_1(image: torch.Tensor) -> None:
    for crop in TwoViews("v2", 16).crop(image):
        assert crop.dtype == torch.float32
        assert 0 <= float(crop.min()) < float(crop.max()) <= 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_crop_and_finish_make_the_views_of_a_call(variant: str) -> None:
    # An image: its crops, then its looks. So a batch of one, finished view by view, is the same.
    image, views = photograph(), TwoViews(variant, 32)
    torch.manual_seed(2)
    whole = views(image)
    torch.manual_seed(2)
    halves = views.crop(image)
    for number, (half, view) in enumerate(zip(halves, whole, strict=True)):
        finished = views.finish(half[None], number)
        assert finished.dtype == torch.float32
        assert torch.allclose(finished[0], view, atol=1e-5)


def test_finish_of_the_second_view_of_v3_solarises() -> None:
    # BYOL, table 6: solarisation 0.0 and 0.2; blur 1.0 and 0.1.
    views = TwoViews("v3", 16, mean=(), std=())
    views.recipes = tuple(replace(recipe, jitter_p=0, grey_p=0, blur_p=0) for recipe in views.recipes)
    white = torch.full((500, 3, 16, 16), 255, dtype=torch.uint8)
    assert float(views.finish(white).min()) == 1
    dark = int((views.finish(white, 1)[:, 0, 0, 0] == 0).sum())
    assert stats.binomtest(dark, 500, 0.2).pvalue > 1e-4


@pytest.mark.parametrize("variant", ["v1", "v2", "v3"])
@pytest.mark.parametrize("batched", [False, True], ids=["one by one", "batched"])
def test_whole_views_are_distributed_as_torchvisions(variant: str, batched: bool) -> None:
    # Statistics of many views of one image, ours and torchvision's: mean, deviation, colourfulness, sharpness.
    from torchvision.transforms import v2

    image = torch.from_numpy(np.array(photograph(32, 32, seed=3))).permute(2, 0, 1).float() / 255
    views = TwoViews(variant, 32, mean=(), std=())
    torch.manual_seed(0)
    count = 600
    pairs = views(image.expand(count, -1, -1, -1)) if batched else [
        torch.stack(half) for half in zip(*(views(image) for _ in range(count)), strict=True)
    ]  # fmt: skip
    for ours, recipe in zip(pairs, views.recipes, strict=True):
        theirs = torch.stack([v2.Compose(recipe.torchvision())(image) for _ in range(count)])
        for statistic in (
            lambda x: x.mean((1, 2, 3)),
            lambda x: x.std((1, 2, 3)),
            lambda x: x.std(1).mean((1, 2)),
            lambda x: x.diff(dim=3).abs().mean((1, 2, 3)),
            lambda x: x[:, 0, 3, 20],
        ):
            assert stats.ks_2samp(statistic(ours).numpy(), statistic(theirs).numpy()).pvalue > 1e-4


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.rand(0, 3, 8, 8), r"\(0, 3, 8, 8\).*\(N, C, H, W\).*at least one image"),
        (torch.rand(3, 8, 8), r"\(3, 8, 8\).*\(N, C, H, W\)"),
        ([torch.rand(3, 8, 8)], r"list.*\(N, C, H, W\)"),
    ],
    ids=["empty", "image", "list"],
)
def test_finish_of_what_is_no_batch(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TwoViews("v2", 8).finish(batch)


@pytest.mark.parametrize("view", [-1, 2])
def test_finish_of_a_view_that_is_none(view: int) -> None:
    with pytest.raises(ValueError, match=rf"view={view}.*0 to 1"):
        TwoViews("v2", 8).finish(torch.rand(1, 3, 8, 8), view)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", VARIANTS)
def test_views_on_the_device_are_those_of_the_cpu(variant: str) -> None:
    images, views = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8), TwoViews(variant, 32)
    torch.manual_seed(1)
    here = views(images)
    torch.manual_seed(1)
    there = views(images.cuda())
    for ours, theirs in zip(here, there, strict=True):
        assert theirs.is_cuda
        assert torch.allclose(ours, theirs.cpu(), atol=1e-4)
