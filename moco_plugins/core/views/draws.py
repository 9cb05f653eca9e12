"""The random parameters of views, of many images at once.

Drawn on the CPU from torch's default generator, wherever the images are: so one seed gives the same views on every
device, and nobody waits for a device to know which images are to be blurred.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .recipes import Recipe

#: Operations of the colour jitter as ``Looks.order`` counts them; an image that is not jittered has four times none.
BRIGHTNESS, CONTRAST, SATURATION, HUE, NONE = range(5)
_TRIES = 10  # as torchvision's RandomResizedCrop


class Crops(NamedTuple):
    """Where N views lie in their images, pixels, and whether they are flipped; each (N,), on the CPU."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    flip: Tensor


class Looks(NamedTuple):
    """What happens to N views after they have been cut out; on the CPU.

    order: (N, 4), the operations of the jitter, first to last. factors: (N, 4), by operation: brightness, contrast,
    saturation, hue. grey, solarise: (N,), bool. sigma: (N,), of the blur, pixels, 0 for none.
    """

    order: Tensor
    factors: Tensor
    grey: Tensor
    sigma: Tensor
    solarise: Tensor

    def one(self) -> Look:
        """The only row."""
        order = [operation for operation in self.order[0].tolist() if operation != NONE]
        grey, sigma, solarise = bool(self.grey), float(self.sigma), bool(self.solarise)
        return Look(order, self.factors[0].tolist(), grey, sigma, solarise)


class Look(NamedTuple):
    """What happens to one view, see :class:`Looks`; an image that is not jittered has no operations."""

    order: Sequence[int]
    factors: Sequence[float]
    grey: bool
    sigma: float
    solarise: bool


def draw_crops(recipe: Recipe, count: int, height: int, width: int) -> Crops:
    """Draw crops of ``count`` images of one size, distributed as torchvision's RandomResizedCrop and RandomHorizontalFlip.

    Area and logarithm of the ratio are uniform; ten tries that such a crop fits, then the largest central one that does.
    """
    u = torch.rand(count, 2 * _TRIES + 3, dtype=torch.float64)
    (low, high), (narrow, wide) = recipe.scale, recipe.ratio
    area = u[:, :_TRIES].mul(high - low).add_(low).mul_(height * width)
    ratio = u[:, _TRIES:-3].mul(math.log(wide / narrow)).add_(math.log(narrow)).exp_()
    widths, heights = (area * ratio).sqrt_().round_(), (area / ratio).sqrt_().round_()
    fits = (widths <= width) & (heights <= height) & (torch.minimum(widths, heights) > 0)
    # One column more, for images where no try fits; argmax finds the first of those that do.
    h, w = _central(height, width, narrow, wide)
    chosen = torch.where(fits.any(1), fits.to(torch.uint8).argmax(1), _TRIES)
    heights = F.pad(heights, (0, 1), value=h).gather(1, chosen[:, None])[:, 0]
    widths = F.pad(widths, (0, 1), value=w).gather(1, chosen[:, None])[:, 0]
    top, left = u[:, -3] * (height - heights + 1), u[:, -2] * (width - widths + 1)
    top = torch.where(chosen == _TRIES, (height - h) // 2, top.long())
    left = torch.where(chosen == _TRIES, (width - w) // 2, left.long())
    return Crops(top, left, heights.long(), widths.long(), u[:, -1] < recipe.flip_p)


def draw_crop(recipe: Recipe, height: int, width: int) -> tuple[int, int, int, int, bool]:
    """One row of :func:`draw_crops`, from the same random numbers, without the cost of many small tensors."""
    u = torch.rand(2 * _TRIES + 3, dtype=torch.float64).tolist()
    (low, high), (narrow, wide) = recipe.scale, recipe.ratio
    for number in range(_TRIES):
        area = (u[number] * (high - low) + low) * (height * width)
        ratio = math.exp(u[_TRIES + number] * math.log(wide / narrow) + math.log(narrow))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(u[-3] * (height - h + 1)), int(u[-2] * (width - w + 1)), h, w, u[-1] < recipe.flip_p
    h, w = _central(height, width, narrow, wide)
    return (height - h) // 2, (width - w) // 2, h, w, u[-1] < recipe.flip_p


def _central(height: int, width: int, narrow: float, wide: float) -> tuple[int, int]:
    if width / height < narrow:
        return round(width / narrow), width
    return (height, round(height * wide)) if width / height > wide else (height, width)


def _ranges(recipe: Recipe) -> tuple[list[float], list[float]]:
    *factors, hue = recipe.jitter
    return [*(max(0.0, 1 - s) for s in factors), -hue], [*(1 + s for s in factors), hue]


def draw_looks(recipe: Recipe, count: int) -> Looks:
    """Draw what torchvision's ColorJitter, RandomGrayscale, GaussianBlur and RandomSolarize would, for ``count`` views."""
    u = torch.rand(count, 13, dtype=torch.float64)
    order = u[:, :4].argsort(1)
    order[u[:, 4] >= recipe.jitter_p] = NONE
    low, high = torch.tensor(_ranges(recipe), dtype=torch.float64)
    smallest, largest = recipe.sigma
    sigma = u[:, 9].mul(largest - smallest).add_(smallest).mul_(u[:, 10] < recipe.blur_p)
    grey, solarise = u[:, 11] < recipe.grey_p, u[:, 12] < recipe.solarise_p
    return Looks(order, torch.lerp(low, high, u[:, 5:9]), grey, sigma, solarise)


def draw_look(recipe: Recipe) -> Look:
    """One row of :func:`draw_looks`, from the same random numbers, without the cost of many small tensors."""
    u = torch.rand(13, dtype=torch.float64).tolist()
    order = sorted(range(4), key=u.__getitem__) if u[4] < recipe.jitter_p else []
    factors = [low + (high - low) * part for low, high, part in zip(*_ranges(recipe), u[5:9], strict=True)]
    smallest, largest = recipe.sigma
    sigma = smallest + (largest - smallest) * u[9] if u[10] < recipe.blur_p else 0.0
    return Look(order, factors, u[11] < recipe.grey_p, sigma, u[12] < recipe.solarise_p)
