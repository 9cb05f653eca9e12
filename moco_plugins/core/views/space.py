"""Crop, resize, flip and blur of many images at once, each equal to torchvision's on float images.

A crop is resized by two products with small matrices: a row holds the weights that one pixel of the result gives to the
pixels of the image, in one direction. A blur is a sum of the image with itself moved, down and then across.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .draws import Crops

_BYTE = 1 / 255


class Axis(NamedTuple):
    """How the pixels of N views lie on their images in one direction; each is made once for a batch.

    before, rest: (N, target), the place of each pixel's centre on the image, whole and fraction apart, so that images of
    any size keep all digits. reach: (N, 1), how far a pixel sees. start, end: (N, 1), of the crop.
    """

    before: Tensor
    rest: Tensor
    reach: Tensor
    start: Tensor
    end: Tensor

    def weights(self, source: int) -> Tensor:
        """Weights (N, target, source) of a bilinear resize, antialiased where it makes smaller."""
        pixels = torch.arange(source, dtype=torch.float32, device=self.start.device)
        weights = pixels - self.before[:, :, None]
        weights.sub_(self.rest[:, :, None]).abs_()
        weights.div_(-self.reach[:, :, None]).add_(1).clamp_min_(0)
        weights.mul_(((pixels >= self.start) & (pixels < self.end)).float()[:, None])
        return weights.div_(weights.sum(2, keepdim=True))


def crop_axes(crops: Crops, size: tuple[int, int], device: torch.device) -> tuple[Axis, Axis]:
    """Where N crops of views of ``size`` lie, down and across, flips included; on ``device``."""
    top, left, height, width, flip = torch.stack([part.float() for part in crops])[:, :, None].to(
        device, non_blocking=True
    )
    return _axis(top, height, size[0]), _axis(left, width, size[1], flip)


def _axis(start: Tensor, length: Tensor, target: int, flip: Tensor | None = None) -> Axis:
    scale = length / target  # in float32, like torch's own kernel
    centre = scale * (torch.arange(target, device=start.device) + 0.5)
    if flip is not None:
        centre = torch.where(flip > 0, centre.flip(1), centre)
    whole = centre.floor()
    return Axis(start + whole, (centre - whole).sub_(0.5), scale.clamp_min(1), start, start + length)


def resized_crops(images: Tensor, down: Axis, across: Axis) -> Tensor:
    """Cut, resize and flip: images (N, C, H, W), uint8 or float, -> planes (C, N, *size), float32 from 0 to 1."""
    n, channels, height, width = images.shape
    rows = images.permute(0, 2, 1, 3).to(torch.float32, memory_format=torch.contiguous_format)  # N, H, C, W
    rows = torch.bmm(down.weights(height), rows.reshape(n, height, channels * width)).view(n, -1, channels, width)
    columns = across.weights(width).transpose(1, 2)
    if images.dtype == torch.uint8:
        columns.mul_(_BYTE)
    planes = rows.new_empty(channels, n, rows.shape[1], columns.shape[2])
    for channel in range(channels):
        torch.bmm(rows[:, :, channel], columns, out=planes[channel])
    return planes


def as_planes(images: Tensor) -> Tensor:
    """Images (N, C, H, W), uint8 or float, as planes (C, N, H, W) of their own, float32 from 0 to 1."""
    planes = images.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return planes.mul_(_BYTE) if images.dtype == torch.uint8 else planes


def resized_crop(part: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize one cut-out (C, H, W): uint8 to uint8, float32 to float32, by torch's antialiased kernels."""
    if tuple(part.shape[1:]) == size:
        return part
    if part.shape[2] > 1 and size[1] > 1:
        return F.interpolate(part[None], size, mode="bilinear", antialias=True)[0]
    # Of what is one pixel wide torch's kernel for bytes makes nonsense or an internal error.
    whole = Crops(*(torch.tensor([value]) for value in (0, 0, *part.shape[1:], 0)))
    resized = resized_crops(part[None], *crop_axes(whole, size, part.device))[:, 0]
    return resized if part.is_floating_point() else resized.mul_(255).round_().to(part.dtype)


def blur(x: Tensor, taps: Sequence[float] | Tensor) -> Tensor:
    """Blur planes (C, N, H, W) by weights from the middle outwards, reflected at the borders, down and then across.

    Args:
        taps: numbers, or (reach + 1, N, 1, 1), for each image its own; see :func:`gaussian`, :func:`gaussians`.
    """
    reach = len(taps) - 1
    border = [min(reach, side - 1) for side in x.shape[2:]]  # reflection has no more to offer
    wide = F.pad(x, (border[1], border[1], border[0], border[0]), mode="reflect")
    extra = [reach - side for side in border]
    if any(extra):
        wide = F.pad(wide, (extra[1], extra[1], extra[0], extra[0]), mode="replicate")
    return _slide(_slide(wide, taps, 2), taps, 3)


def gaussian(sigma: float, kernel: int) -> list[float]:
    """Weights of a Gaussian of ``kernel`` pixels from the middle outwards, as far as they can be seen."""
    weights = [math.exp(-0.5 * (offset / sigma) ** 2) for offset in range(kernel // 2 + 1)]
    whole = 2 * sum(weights) - 1
    return [weight / whole for weight in weights[: reach_of(sigma) + 1]]


def gaussians(sigma: Tensor, kernel: int, device: torch.device) -> Tensor:
    """The same of several ``sigma`` (N,), all of them: (kernel // 2 + 1, N, 1, 1) on ``device``."""
    offsets = torch.arange(kernel // 2 + 1)[:, None]
    taps = torch.exp(-0.5 * (offsets / sigma.clamp_min(1e-6)) ** 2)
    taps /= 2 * taps.sum(0) - 1
    return taps.float().to(device, non_blocking=True)[:, :, None, None]


def reach_of(sigma: float) -> int:
    """Pixels to either side, beyond which a Gaussian's weights are less than a millionth together."""
    return math.ceil(5 * sigma)


def _slide(x: Tensor, taps: Sequence[float] | Tensor, axis: int) -> Tensor:
    """Weighted sum of ``x`` with itself moved along an axis, which gets shorter by the reach of the taps on both sides."""
    reach = len(taps) - 1
    size = x.shape[axis] - 2 * reach
    total = x.narrow(axis, reach, size) * taps[0]
    for offset in range(1, reach + 1):
        tap = taps[offset]
        before, after = x.narrow(axis, reach - offset, size), x.narrow(axis, reach + offset, size)
        if isinstance(tap, Tensor):
            total.addcmul_(before + after, tap)
        else:
            total.add_(before, alpha=tap).add_(after, alpha=tap)
    return total
