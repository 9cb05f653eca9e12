"""Two views of an image: the augmentations of MoCo v1, v2 and v3, and batched ones for small grey images.

Images may be PIL or tensors (C, H, W) of any channel count, 8 or 16 bit or float in [0, 1]; views are float32 tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: ImageNet's channel means and standard deviations, as in all of the authors' code.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Transform = Callable[[Any], Any]


class TwoViews:
    """Make the two views of an image that MoCo contrasts: image -> (view_q, view_k), each (C, image_size, image_size).

    Colour jitter of hue and saturation and the conversion to grey are left out where an image is not RGB.

    Args:
        variant: "v1" (arXiv:1911.05722, section 3.3), "v2" and "v2+" (arXiv:2003.04297, section 3), "v3"
            (arXiv:2104.02057, section 4.1: BYOL's, where the two views differ in blur and solarisation).
        image_size: side of a view; 224.
        min_scale: smallest area of the crop, as a fraction; 0.2, v3: 0.08.
        mean, std: normalisation per channel; ImageNet's for RGB, none for others. ``()`` for none.

    Attributes:
        transforms: the two pipelines, each a list of torchvision transforms; public, to look at and to change.

    Raises:
        ValueError: an unknown variant, a size below 1, or statistics that do not fit.
    """

    batched = False

    def __init__(
        self,
        variant: str = "v2",
        image_size: int = 224,
        min_scale: float | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        if variant not in ("v1", "v2", "v2+", "v3"):
            raise ValueError(f"variant={variant!r} is not one of v1, v2, v2+, v3")
        if image_size < 1:
            raise ValueError(f"image_size={image_size} must be at least 1")
        if min_scale is not None and not 0 < min_scale <= 1:
            raise ValueError(f"min_scale={min_scale} must lie in (0, 1]: it is a fraction of the image's area")
        _check_statistics(mean, std)
        self.variant, self.image_size = variant, image_size
        self.mean, self.std = mean, std
        self.transforms = tuple(
            _pipeline(variant, image_size, min_scale, second_of_v3=second and variant == "v3")
            for second in (False, True)
        )

    def __call__(self, image: Any) -> tuple[Tensor, Tensor]:
        """Return two views of a PIL image or tensor (C, H, W)."""
        image = _readable(image)
        first, second = (self._view(image, pipeline) for pipeline in self.transforms)
        return first, second

    def _view(self, image: Any, pipeline: Sequence[Transform]) -> Tensor:
        channels = _channels(image)
        for transform in pipeline:
            if channels in (1, 3) or not getattr(transform, "needs_colour", False):
                image = transform(image)
        return self._normalise(_to_float(image))

    def _normalise(self, view: Tensor) -> Tensor:
        mean, std = self.mean, self.std
        if mean is None or std is None:
            mean, std = (IMAGENET_MEAN, IMAGENET_STD) if view.shape[0] == 3 else ((), ())
        if not mean:
            return view
        if len(mean) not in (1, view.shape[0]):
            raise ValueError(
                f"mean has {len(mean)} values and the image {view.shape[0]} channels; give one value a channel, or one for all"
            )
        shape = (len(mean), 1, 1)
        return (view - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)

    def __repr__(self) -> str:
        return f"TwoViews(variant={self.variant!r}, image_size={self.image_size})"


def _check_statistics(mean: Sequence[float] | None, std: Sequence[float] | None) -> None:
    if mean is None and std is None:
        return
    if mean is None or std is None:
        raise ValueError(f"mean={mean!r} and std={std!r} go together: give both, or neither")
    if len(mean) != len(std):
        raise ValueError(f"mean has {len(mean)} values and std {len(std)}; give as many of each, one a channel")
    if any(not value > 0 for value in std):
        raise ValueError(f"std={std!r} must be greater than 0")


def _pipeline(variant: str, size: int, min_scale: float | None, second_of_v3: bool) -> list[Transform]:
    from torchvision.transforms import v2

    def colour(transform: Transform) -> Transform:
        transform.needs_colour = True  # type: ignore[attr-defined]
        return transform

    # A blur kernel of a tenth of the image, odd: 23 at 224 (SimCLR, arXiv:2002.05709, appendix A).
    kernel = max(3, int(0.1 * size) // 2 * 2 + 1)
    scale = (min_scale if min_scale is not None else (0.08 if variant == "v3" else 0.2), 1.0)
    crop = v2.RandomResizedCrop(size, scale=scale, antialias=True)
    grey = colour(v2.RandomGrayscale(p=0.2))
    flip = v2.RandomHorizontalFlip(p=0.5)
    if variant == "v1":
        return [crop, grey, colour(v2.ColorJitter(0.4, 0.4, 0.4, 0.4)), flip]
    saturation = 0.2 if variant == "v3" else 0.4
    jitter = colour(v2.RandomApply([v2.ColorJitter(0.4, 0.4, saturation, 0.1)], p=0.8))
    blur_p = (0.1 if second_of_v3 else 1.0) if variant == "v3" else 0.5
    blur = v2.RandomApply([v2.GaussianBlur(kernel, sigma=(0.1, 2.0))], p=blur_p)
    pipeline: list[Transform] = [crop, jitter, grey, blur]
    if second_of_v3:
        pipeline.append(v2.RandomSolarize(threshold=_SOLARIZE, p=0.2))
    return [*pipeline, flip]


_SOLARIZE = 128.0 / 255


def _readable(image: Any) -> Any:
    """Bring an image into a form that torchvision's transforms take: 8-bit PIL as it is, else a float tensor."""
    if isinstance(image, Tensor):
        if image.ndim not in (2, 3):
            raise ValueError(
                f"image has shape {tuple(image.shape)}; it must be (C, H, W): views are made image by image"
            )
        return _to_float(image[None] if image.ndim == 2 else image)
    if hasattr(image, "mode"):
        if image.mode in ("P", "1", "CMYK", "YCbCr", "HSV", "LAB", "PA"):
            image = image.convert("RGB" if image.mode != "1" else "L")
        return _to_float(image)
    raise TypeError(f"image is a {type(image).__name__}; it must be a PIL image or a tensor (C, H, W)")


def _to_float(image: Any) -> Tensor:
    """Turn an image into a float32 tensor (C, H, W), integers scaled to [0, 1] by the range of their type."""
    if not isinstance(image, Tensor):
        import numpy as np

        array = np.array(image)
        image = torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())
        if image.dtype == torch.int32:  # PIL's mode I holds 16-bit images
            return image.float() / 65535
    if image.is_floating_point() or image.dtype == torch.bool:
        return image.float()
    return image.float() / torch.iinfo(image.dtype).max


def _channels(image: Any) -> int:
    return int(image.shape[-3])


class AffineViews:
    """Batched views for small grey images such as digits: each a random affine map, no flips and no colours.

    Takes (N, C, H, W) or (C, H, W), integer or float; one call of ``grid_sample`` makes all views of a batch, on the
    images' device.

    Args:
        image_size: side of a view, or 0 for the images' own.
        rotation: largest angle, radians. scale: range of the zoom. shift: largest shift, as a fraction of half the
            side. shear: largest shear. noise: standard deviation of additive noise.
    """

    batched = True

    def __init__(
        self,
        image_size: int = 0,
        rotation: float = 0.25,
        scale: tuple[float, float] = (0.9, 1.4),
        shift: float = 0.2,
        shear: float = 0.2,
        noise: float = 0.0,
    ) -> None:
        if not 0 < scale[0] <= scale[1]:
            raise ValueError(f"scale={scale!r} must be a range of positive numbers, (smallest, largest)")
        self.image_size, self.rotation, self.scale, self.shift, self.shear = image_size, rotation, scale, shift, shear
        self.noise = noise

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return two views of each image, shaped like ``images``."""
        single = images.ndim == 3
        batch = _to_float(images[None] if single else images)
        first, second = self._view(batch), self._view(batch)
        return (first[0], second[0]) if single else (first, second)

    def _view(self, images: Tensor) -> Tensor:
        n, channels, height, width = images.shape

        def uniform(low: float, high: float) -> Tensor:
            return torch.empty(n, device=images.device).uniform_(low, high)

        angle, shear = uniform(-self.rotation, self.rotation), uniform(-self.shear, self.shear)
        zoom = torch.exp(uniform(math.log(self.scale[0]), math.log(self.scale[1])))
        cos, sin = torch.cos(angle) / zoom, torch.sin(angle) / zoom
        rows = [
            torch.stack([cos, -sin + shear * cos, uniform(-self.shift, self.shift)], 1),
            torch.stack([sin, cos + shear * sin, uniform(-self.shift, self.shift)], 1),
        ]
        size = [n, channels, self.image_size or height, self.image_size or width]
        grid = F.affine_grid(torch.stack(rows, 1), size, align_corners=False)  # N x H x W x 2
        view = F.grid_sample(images, grid, align_corners=False)
        return view + self.noise * torch.randn_like(view) if self.noise else view

    def __repr__(self) -> str:
        return (
            f"AffineViews(rotation={self.rotation}, scale={self.scale}, shift={self.shift}, shear={self.shear}, "
            f"noise={self.noise})"
        )
