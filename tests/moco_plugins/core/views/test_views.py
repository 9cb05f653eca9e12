"""Two views of any image, with the augmentations of the papers.

v1: He et al. 2020, arXiv:1911.05722, section 3.3. v2: Chen et al. 2020, arXiv:2003.04297, section 3 (SimCLR's,
arXiv:2002.05709, appendix A, with a smaller hue jitter). v3: arXiv:2104.02057, section 4.1, which takes BYOL's
(arXiv:2006.07733, appendix B, table 6).
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from moco_plugins import TwoViews


def settings(transform: Any) -> Any:
    """The numbers of a torchvision transform."""
    if isinstance(transform, v2.RandomApply):
        return (settings(transform.transforms[0]), transform.p)
    if isinstance(transform, v2.RandomResizedCrop):
        return ("crop", tuple(transform.size), tuple(transform.scale), tuple(np.round(transform.ratio, 4)))
    if isinstance(transform, v2.ColorJitter):
        ranges = (transform.brightness, transform.contrast, transform.saturation, transform.hue)
        return ("jitter", *(round(high - middle, 6) for (_, high), middle in zip(ranges, (1, 1, 1, 0), strict=True)))
    if isinstance(transform, v2.RandomGrayscale):
        return ("grey", transform.p)
    if isinstance(transform, v2.GaussianBlur):
        return ("blur", tuple(transform.kernel_size), tuple(transform.sigma))
    if isinstance(transform, v2.RandomSolarize):
        return ("solarise", transform.p)
    if isinstance(transform, v2.RandomHorizontalFlip):
        return ("flip", transform.p)
    raise AssertionError(f"{transform} is not in the papers")


CROP = ("crop", (224, 224), (0.2, 1.0), (0.75, 1.3333))  # 0.2: the authors' code for v1 and v2
BLUR = ("blur", (23, 23), (0.1, 2.0))  # SimCLR: a tenth of 224, sigma 0.1 to 2


def test_v1_views() -> None:
    # Section 3.3: random crop resized to 224, colour jitter, horizontal flip, greyscale conversion.
    expected = [CROP, ("grey", 0.2), ("jitter", 0.4, 0.4, 0.4, 0.4), ("flip", 0.5)]
    assert [[settings(t) for t in recipe.torchvision()] for recipe in TwoViews("v1").recipes] == [expected, expected]


@pytest.mark.parametrize("variant", ["v2", "v2+"])
def test_v2_views(variant: str) -> None:
    # Section 3: v1's and blur. The authors' recipe for aug+: jitter 0.4, 0.4, 0.4, 0.1 with p 0.8, grey 0.2, blur 0.5.
    expected = [CROP, (("jitter", 0.4, 0.4, 0.4, 0.1), 0.8), ("grey", 0.2), (BLUR, 0.5), ("flip", 0.5)]
    assert [[settings(t) for t in recipe.torchvision()] for recipe in TwoViews(variant).recipes] == [expected, expected]


def test_v3_views() -> None:
    # BYOL, table 6: jitter 0.4, 0.4, 0.2, 0.1 with p 0.8, grey 0.2; blur 1.0 and 0.1; solarisation 0.0 and 0.2.
    crop = ("crop", (224, 224), (0.08, 1.0), (0.75, 1.3333))  # area 0.08 to 1
    jitter = (("jitter", 0.4, 0.4, 0.2, 0.1), 0.8)
    first, second = ([settings(t) for t in recipe.torchvision()] for recipe in TwoViews("v3").recipes)
    assert first == [crop, jitter, ("grey", 0.2), BLUR, ("flip", 0.5)]
    assert second == [crop, jitter, ("grey", 0.2), (BLUR, 0.1), ("solarise", 0.2), ("flip", 0.5)]


def gradient_image(mode: str) -> Image.Image:
    ramp = np.linspace(0, 255, 40 * 30).reshape(40, 30)
    if mode == "I;16":
        return Image.fromarray((ramp * 257).astype(np.uint16))
    if mode == "I":
        return Image.fromarray((ramp * 257).astype(np.int32))
    if mode == "F":
        return Image.fromarray((ramp / 255).astype(np.float32))
    if mode == "1":
        return Image.fromarray(ramp.astype(np.uint8)).convert("1")
    colours = np.stack([ramp, ramp[::-1], 255 - ramp], 2).astype(np.uint8)
    return Image.fromarray(colours).convert(mode)


MODES = {
    "L": 1,
    "1": 1,
    "I;16": 1,
    "I": 1,
    "F": 1,
    "RGB": 3,
    "RGBA": 4,
    "P": 3,
    "LA": 2,
    "CMYK": 3,
    "YCbCr": 3,
    "HSV": 3,
}


def plain(size: int = 24, **options: Any) -> TwoViews:
    """Views without anything random but the crop, to look at the values."""
    views = TwoViews("v2", size, **options)
    quiet = replace(views.recipes[0], jitter_p=0, grey_p=0, blur_p=0, flip_p=0)
    views.recipes = (quiet, quiet)
    return views


@pytest.mark.parametrize("variant", ["v1", "v2", "v3"])
@pytest.mark.parametrize("mode", MODES)
def test_pil_images_of_every_mode(mode: str, variant: str) -> None:
    image = gradient_image(mode)
    assert image.mode == mode
    views = TwoViews(variant, 24)
    for _ in range(4):
        for view in views(image):
            assert view.shape == (MODES[mode], 24, 24)
            assert view.dtype == torch.float32
            assert torch.isfinite(view).all()
            assert float(view.std()) > 0
            if MODES[mode] != 3:
                assert -1e-5 <= float(view.min()) <= float(view.max()) <= 1 + 1e-5


@pytest.mark.parametrize("mode", ["L", "I;16", "I", "F", "RGBA"])
def test_values_keep_their_scale(mode: str) -> None:
    # A white image stays white, whatever its bits.
    size = (20, 20)
    white = {
        "I;16": lambda: Image.fromarray(np.full(size, 65535, np.uint16)),
        "I": lambda: Image.fromarray(np.full(size, 65535, np.int32)),
        "F": lambda: Image.fromarray(np.ones(size, np.float32)),
        "L": lambda: Image.new("L", size, 255),
        "RGBA": lambda: Image.new("RGBA", size, (255, 255, 255, 255)),
    }[mode]()
    for view in plain()(white):
        assert torch.allclose(view, torch.ones_like(view), atol=1e-4)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.uint16, torch.int32, torch.float16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 13])
@pytest.mark.parametrize("variant", ["v1", "v2", "v3"])
def test_tensors_of_any_channel_count(variant: str, channels: int, dtype: torch.dtype) -> None:
    values = torch.rand(channels, 33, 41)
    top = 1 if dtype.is_floating_point or dtype == torch.bool else torch.iinfo(dtype).max
    image = (values.double().round() if dtype == torch.bool else values.double() * top).to(dtype)
    for _ in range(3):
        for view in TwoViews(variant, 16)(image):
            assert view.shape == (channels, 16, 16)
            assert view.dtype == torch.float32
            assert torch.isfinite(view).all()
            if channels != 3:
                assert -1e-5 <= float(view.min()) <= float(view.max()) <= 1 + 1e-5
    for view in plain()(image):
        if channels != 3:
            assert float(view.mean()) == pytest.approx(0.5, abs=0.15)


def test_grey_images_without_channel_axis() -> None:
    for view in TwoViews("v2", 16)(torch.rand(20, 20)):
        assert view.shape == (1, 16, 16)


def test_rgb_is_normalised_by_imagenets_statistics_and_others_are_not() -> None:
    # Mean (0.485, 0.456, 0.406) and std (0.229, 0.224, 0.225), as in the authors' code.
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    for view in plain()(torch.full((3, 30, 30), 0.5)):
        assert torch.allclose(view.mean((1, 2)), (0.5 - mean) / std, atol=1e-4)
    for channels in (1, 4):
        for view in plain()(torch.full((channels, 30, 30), 0.5)):
            assert torch.allclose(view, torch.full_like(view, 0.5), atol=1e-5)
    for view in plain(mean=(), std=())(torch.full((3, 30, 30), 0.5)):
        assert torch.allclose(view, torch.full_like(view, 0.5), atol=1e-5)
    for view in plain(mean=(0.25,), std=(0.5,))(torch.full((1, 30, 30), 0.5)):
        assert torch.allclose(view, torch.full_like(view, 0.5), atol=1e-5)
    for view in plain(mean=(0.0,) * 13, std=(2.0,) * 13)(torch.full((13, 30, 30), 0.5)):
        assert torch.allclose(view, torch.full_like(view, 0.25), atol=1e-5)


def test_views_differ_from_each_other_and_between_calls_and_follow_the_seed() -> None:
    image, views = gradient_image("RGB"), TwoViews("v2", 24)
    torch.manual_seed(3)
    first, second = views(image)
    again, _ = views(image)
    assert not torch.equal(first, second)
    assert not torch.equal(first, again)
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(views(image), (first, second), strict=True))


def test_only_what_needs_colour_is_left_out() -> None:
    # A 13-channel image is cropped, flipped and blurred as any other: over many views its mean brightness stays.
    image = torch.rand(13, 32, 32)
    views = [view for _ in range(30) for view in TwoViews("v1", 16)(image)]
    assert all(float(view.mean()) == pytest.approx(float(image.mean()), abs=0.05) for view in views)
    assert len({float(view.sum()) for view in views}) > 50


def test_source_image_is_left_as_it_is() -> None:
    for image in (torch.rand(3, 20, 20), torch.rand(1, 20, 20)):
        before = image.clone()
        TwoViews("v3", 16)(image)
        assert torch.equal(image, before)


def test_transforms_travel_to_worker_processes() -> None:
    for variant in ("v1", "v2", "v3"):
        views = pickle.loads(pickle.dumps(TwoViews(variant, 16)))
        for mode in ("L", "RGB"):
            assert views(gradient_image(mode))[0].shape[1:] == (16, 16)
        # Colour transforms are still known as such.
        assert views(torch.rand(13, 20, 20))[0].shape == (13, 16, 16)


def test_views_come_out_of_a_data_loader_as_a_pair_of_batches() -> None:
    class Images(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return TwoViews("v2", 16)(gradient_image("RGB")), index

    (first, second), labels = next(iter(torch.utils.data.DataLoader(Images(), batch_size=6)))
    assert first.shape == second.shape == (6, 3, 16, 16)
    assert labels.tolist() == list(range(6))


def test_the_views_as_torchvisions_transforms_are_to_look_at() -> None:
    views = TwoViews("v2", 16)
    assert [settings(t) for t in views.transforms[0]] == [settings(t) for t in views.recipes[0].torchvision()]
    with pytest.raises(AttributeError):
        views.transforms = ()  # type: ignore[misc]


@pytest.mark.parametrize("size", [1, 8, 32, 64, 96, 224])
def test_blur_grows_with_the_image(size: int) -> None:
    kernel = TwoViews("v2", size).recipes[0].kernel
    assert kernel % 2 == 1
    assert abs(kernel - size / 10) <= 1 or kernel == 3
    assert TwoViews("v3", size)(torch.rand(3, size, size))[0].shape == (3, size, size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "v4"}, r"variant='v4'.*v1, v2, v2\+, v3"),
        ({"image_size": 0}, "image_size=0.*at least 1"),
        ({"image_size": (32, 0)}, r"image_size=\(32, 0\).*at least 1"),
        ({"mean": (0.5,)}, r"mean=\(0.5,\).*std=None.*both"),
        ({"std": (0.5,)}, r"mean=None.*std=\(0.5,\).*both"),
        ({"min_scale": 0.0}, r"min_scale=0.0.*\(0, 1\]"),
        ({"min_scale": 1.5}, r"min_scale=1.5.*\(0, 1\]"),
        ({"mean": (0.5, 0.5), "std": (0.5,)}, r"mean.*2.*std.*1"),
        ({"mean": (0.5,), "std": (0.0,)}, r"std=\(0.0,\)"),
    ],
    ids=str,
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TwoViews(**options)


@pytest.mark.parametrize("size", [(32,), (32, 32, 3), 32.0, "32", None], ids=str)
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(TypeError, match=r"image_size=.*whole number of pixels, or \(height, width\)"):
        TwoViews("v2", size)


def test_statistics_of_another_channel_count() -> None:
    with pytest.raises(ValueError, match=r"mean has 3.*1 channel"):
        TwoViews("v2", 16, mean=(0.5,) * 3, std=(0.5,) * 3)(torch.rand(1, 20, 20))


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        (torch.rand(1, 2, 3, 20, 20), ValueError, r"\(1, 2, 3, 20, 20\).*\(C, H, W\).*\(N, C, H, W\)"),
        (torch.rand(20), ValueError, r"\(20,\).*\(C, H, W\)"),
        (torch.rand(3, 0, 20), ValueError, r"\(3, 0, 20\).*pixels"),
        (torch.rand(0, 3, 20, 20), ValueError, r"\(0, 3, 20, 20\).*at least one image"),
        (np.zeros((20, 20, 3), np.uint8), TypeError, r"ndarray.*PIL image or a tensor"),
        ("image.png", TypeError, r"str.*PIL image or a tensor"),
        (None, TypeError, r"NoneType.*PIL image or a tensor"),
    ],
    ids=["video", "row", "no pixels", "no images", "array", "path", "None"],
)
def test_bad_images(image: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TwoViews("v2", 16)(image)
