"""Every operation of the views equals torchvision's functional one on float images, given the same parameters."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from moco_plugins.core.views import colour
from moco_plugins.core.views.draws import NONE, Crops, Looks, draw_crops, draw_looks
from moco_plugins.core.views.recipes import Recipe
from moco_plugins.core.views.render import render, render_one
from moco_plugins.core.views.space import as_planes, blur, crop_axes, gaussian, gaussians, resized_crop, resized_crops

CLOSE = 1e-5
OPERATIONS = {
    colour.BRIGHTNESS: tv.adjust_brightness,
    colour.CONTRAST: tv.adjust_contrast,
    colour.SATURATION: tv.adjust_saturation,
    colour.HUE: tv.adjust_hue,
}


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def pictures(seed: int, *shape: int) -> Tensor:
    """Random colours, among them greys, black, white and pixels with two equal channels, where hue has its edges."""
    images = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    if shape[-3] == 3:
        images[..., 1, 0, :] = images[..., 0, 0, :]
        images[..., :, 1, :] = images[..., :1, 1, :]
        images[..., :, -1, 0], images[..., :, -1, 1] = 0, 1
    return images


# From two pixels: what is one pixel wide torch's own kernel resizes wrongly, as if it were one pixel high as well.
SIDES = st.tuples(st.integers(2, 70), st.integers(2, 70))


@given(st.integers(0, 1000), SIDES, SIDES)
@settings(max_examples=60, deadline=None)
def test_crop_resize_and_flip_at_any_scale(seed: int, source: tuple[int, int], target: tuple[int, int]) -> None:
    torch.manual_seed(seed)
    images, crops = torch.rand(6, 2, *source), draw_crops(Recipe(target, (0.02, 1.0)), 6, *source)
    ours = resized_crops(images, *crop_axes(crops, target, images.device))
    for number in range(6):
        top, left, height, width, flip = (int(column[number]) for column in crops)
        theirs = tv.resized_crop(images[number], top, left, height, width, list(target), antialias=True)
        assert difference(ours[:, number], tv.horizontal_flip(theirs) if flip else theirs) < CLOSE


def test_crop_of_a_photograph_of_4000_pixels() -> None:
    image = pictures(0, 3, 1500, 4000)
    crops = Crops(*(torch.tensor([value]) for value in (3, 107, 1490, 3333)), torch.tensor([True]))
    ours = resized_crops(image[None], *crop_axes(crops, (224, 224), image.device))[:, 0]
    theirs = tv.resized_crop(image, 3, 107, 1490, 3333, [224, 224], antialias=True)
    assert difference(ours, tv.horizontal_flip(theirs)) < CLOSE


@given(st.sampled_from(list(OPERATIONS)), st.floats(0, 3), st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_colour_operations(operation: int, factor: float, seed: int) -> None:
    image = pictures(seed, 3, 9, 11)
    if operation == colour.HUE:
        factor = factor / 3 - 0.5
    ours = as_planes(image[None])
    colour.jitter(ours, [operation], {operation: factor})  # type: ignore[arg-type]
    assert difference(ours[:, 0], OPERATIONS[operation](image, factor)) < CLOSE


def in_turn(image: Tensor, order: Any, factors: Any) -> Tensor:
    for operation in order:
        if int(operation) != NONE:
            image = OPERATIONS[int(operation)](image, float(factors[int(operation)]))
    return image


def test_jitter_in_every_order_each_image_its_own() -> None:
    orders = torch.tensor([*itertools.permutations(range(4)), [NONE] * 4] * 2)
    torch.manual_seed(0)
    factors = torch.cat([0.2 + 1.6 * torch.rand(50, 3), torch.rand(50, 1) - 0.5], 1)
    images = pictures(1, 50, 3, 8, 9)
    mixed = as_planes(images)
    colour.jitter_each(mixed, orders, factors.T[:, :, None, None])
    for number, image in enumerate(images):
        theirs = in_turn(image, orders[number], factors[number])
        assert difference(mixed[:, number], theirs) < CLOSE
        alone = as_planes(image[None])
        colour.jitter(alone, [o for o in orders[number].tolist() if o != NONE], factors[number].tolist())
        assert difference(alone[:, 0], theirs) < CLOSE


def test_grey_images_have_brightness_and_contrast_alone() -> None:
    image = pictures(2, 1, 8, 9)
    planes = as_planes(image[None])
    colour.jitter(planes, [3, 1, 2, 0], [1.3, 0.6, 0.5, 0.2])
    assert difference(planes[:, 0], tv.adjust_brightness(tv.adjust_contrast(image, 0.6), 1.3)) < CLOSE


def test_grey_and_solarisation() -> None:
    image = pictures(3, 3, 8, 9)
    planes = as_planes(image[None])
    colour.grey(planes)
    assert difference(planes[:, 0], tv.rgb_to_grayscale(image, 3)) < CLOSE
    planes = as_planes(image[None])
    colour.solarise(planes, 128 / 255)
    assert difference(planes[:, 0], tv.solarize(image, 128 / 255)) < CLOSE
    ramp = torch.tensor([0.0, 0.2, 0.49, 0.6, 1.0]).view(1, 1, 1, 5)
    colour.solarise(ramp, 128 / 255)
    assert torch.allclose(ramp.flatten(), torch.tensor([0.0, 0.2, 0.49, 0.4, 0.0]))


@pytest.mark.parametrize(("size", "kernel"), [((32, 32), 3), ((40, 24), 7), ((64, 64), 23), ((224, 30), 23)], ids=str)
def test_gaussian_blur_each_image_its_own(size: tuple[int, int], kernel: int) -> None:
    sigmas = torch.tensor([0.1, 0.3, 0.77, 1.0, 1.5, 2.0])
    images = pictures(4, 6, 2, *size)
    together = blur(as_planes(images), gaussians(sigmas, kernel, images.device))
    for number, sigma in enumerate(sigmas.tolist()):
        theirs = tv.gaussian_blur(images[number], [kernel, kernel], [sigma, sigma])
        assert difference(together[:, number], theirs) < CLOSE
        assert difference(blur(as_planes(images[number][None]), gaussian(sigma, kernel))[:, 0], theirs) < CLOSE


def by_torchvision(image: Tensor, recipe: Recipe, crops: Crops, looks: Looks, row: int) -> Tensor:
    top, left, height, width, flip = (int(column[row]) for column in crops)
    view = tv.resized_crop(image, top, left, height, width, list(recipe.size), antialias=True)
    steps = [
        lambda x: in_turn(x, looks.order[row], looks.factors[row]),
        lambda x: tv.rgb_to_grayscale(x, 3) if looks.grey[row] else x,
    ]
    for step in reversed(steps) if recipe.grey_first else steps:
        view = step(view)
    if looks.sigma[row] > 0:
        view = tv.gaussian_blur(view, [recipe.kernel] * 2, [float(looks.sigma[row])] * 2)
    if looks.solarise[row]:
        view = tv.solarize(view, recipe.threshold)
    return tv.horizontal_flip(view) if flip else view


@pytest.mark.parametrize("grey_first", [False, True], ids=["jitter first", "grey first"])
@pytest.mark.parametrize(
    ("source", "size", "count", "kernel"),
    [((32, 32), (32, 32), 90, 3), ((37, 61), (24, 48), 90, 3), ((300, 260), (224, 224), 4, 23)],
    ids=str,
)
def test_whole_views(source: tuple[int, int], size: tuple[int, int], count: int, kernel: int, grey_first: bool) -> None:
    torch.manual_seed(0)
    recipe = Recipe(size, (0.1, 1.0), kernel=kernel, solarise_p=0.3, grey_first=grey_first, jitter=(0.4, 0.4, 0.4, 0.5))
    images = pictures(5, count, 3, *source)
    crops, looks = draw_crops(recipe, count, *source), draw_looks(recipe, count)
    views = render(images, recipe, looks, crops)
    for row, image in enumerate(images):
        assert difference(views[row], by_torchvision(image, recipe, crops, looks, row)) < CLOSE


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_one_view_is_a_batch_of_one(channels: int, dtype: torch.dtype) -> None:
    recipe = Recipe((20, 20), (0.2, 1.0), solarise_p=0.5)
    images = (pictures(6, 40, channels, 20, 20) * (255 if dtype == torch.uint8 else 1)).to(dtype)
    torch.manual_seed(3)
    looks = draw_looks(recipe, 40)
    together = render(images, recipe, looks)
    for row, image in enumerate(images):
        look = Looks(*(column[row : row + 1] for column in looks)).one()
        assert difference(render_one(image, recipe, look, lambda planes: None), together[row]) < CLOSE


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [(1, 1), (5, 1), (1, 5), (31, 33)], ids=str)
@pytest.mark.parametrize("source", [(1, 1), (6, 1), (1, 6), (40, 25)], ids=str)
def test_bytes_are_resized_to_within_one_level_of_floats(source: Any, size: Any, channels: int) -> None:
    image = (torch.rand(channels, 45, 47, generator=torch.Generator().manual_seed(7)) * 255).to(torch.uint8)
    for layout in (image, image.permute(1, 2, 0).contiguous().permute(2, 0, 1)):  # planes, and pixels as PIL has them
        part = layout[:, 2 : 2 + source[0], 3 : 3 + source[1]]
        ours = resized_crop(part, size)
        assert ours.dtype == torch.uint8
        crops = Crops(*(torch.tensor([value]) for value in (0, 0, *source)), torch.tensor([False]))
        exact = resized_crops(part[None].float() / 255, *crop_axes(crops, size, part.device))[:, 0]
        assert difference(ours / 255, exact) < 1.01 / 255
