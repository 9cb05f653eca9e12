"""Batched views of small grey images."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...sizes import Size, sides
from .images import to_float


class AffineViews:
    """Batched views for small grey images such as digits: each a random affine map, no flips and no colours.

    Takes (N, C, H, W) or (C, H, W), integer or float; one call of ``grid_sample`` makes all views of a batch, on the
    images' device.

    Args:
        image_size: side of a view, or (height, width), or 0 for the images' own.
        rotation: largest angle, radians. scale: range of the zoom. shift: largest shift, as a fraction of half the
            side. shear: largest shear. noise: standard deviation of additive noise.
    """

    batched = True

    def __init__(
        self,
        image_size: Size = 0,
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
        batch = to_float(images[None] if single else images)
        first, second = self._view(batch), self._view(batch)
        return (first[0], second[0]) if single else (first, second)

    def _view(self, images: Tensor) -> Tensor:
        n, channels, height, width = images.shape

        def uniform(low: float, high: float) -> Tensor:
            return torch.empty(n).uniform_(low, high)  # on the CPU: a seed gives the same views on every device

        angle, shear = uniform(-self.rotation, self.rotation), uniform(-self.shear, self.shear)
        zoom = torch.exp(uniform(math.log(self.scale[0]), math.log(self.scale[1])))
        cos, sin = torch.cos(angle) / zoom, torch.sin(angle) / zoom
        rows = [
            torch.stack([cos, -sin + shear * cos, uniform(-self.shift, self.shift)], 1),
            torch.stack([sin, cos + shear * sin, uniform(-self.shift, self.shift)], 1),
        ]
        size = [n, channels, *(sides("image_size", self.image_size) if self.image_size else (height, width))]
        grid = F.affine_grid(torch.stack(rows, 1).to(images.device), size, align_corners=False)  # N x H x W x 2
        view = F.grid_sample(images, grid, align_corners=False)
        return view + self.noise * torch.randn(view.shape).to(view.device) if self.noise else view

    def __repr__(self) -> str:
        return (
            f"AffineViews(rotation={self.rotation}, scale={self.scale}, shift={self.shift}, shear={self.shear}, "
            f"noise={self.noise})"
        )
