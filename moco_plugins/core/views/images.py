"""Images of any kind, PIL or tensor, read as what views are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TO_RGB = ("P", "CMYK", "YCbCr", "HSV", "LAB", "PA")


def readable(image: Any) -> Any:
    """Return a PIL image of a mode that numpy reads, or a tensor (C, H, W), uint8 or float32 from 0 to 1.

    Nothing of a PIL image is converted that need not be: its pixels are read by :func:`pixels`, after it is cut.

    Raises:
        TypeError, ValueError: it is neither, or of another shape.
    """
    if isinstance(image, Tensor):
        if image.ndim not in (2, 3) or image.numel() == 0:
            raise ValueError(
                f"image has shape {tuple(image.shape)}; it must be (C, H, W), or a batch (N, C, H, W), with pixels in it"
            )
        image = image[None] if image.ndim == 2 else image
        return image if image.dtype == torch.uint8 else to_float(image)
    if not hasattr(image, "mode"):
        raise TypeError(
            f"image is a {type(image).__name__}; it must be a PIL image or a tensor, (C, H, W) or (N, C, H, W)"
        )
    if image.mode in _TO_RGB:
        return image.convert("RGB")
    return image.convert("L") if image.mode == "1" else image


def size_of_image(image: Any) -> tuple[int, int]:
    """(height, width) of what :func:`readable` returns."""
    if isinstance(image, Tensor):
        return int(image.shape[1]), int(image.shape[2])
    return int(image.size[1]), int(image.size[0])


def pixels(image: Any, top: int, left: int, height: int, width: int) -> Tensor:
    """A part of what :func:`readable` returns, as a tensor (C, height, width): uint8, or float32 from 0 to 1."""
    if isinstance(image, Tensor):
        return image[:, top : top + height, left : left + width]
    import numpy as np

    array = np.array(image.crop((left, top, left + width, top + height)))
    part = torch.from_numpy(array[..., None] if array.ndim == 2 else array).permute(2, 0, 1)
    if part.dtype == torch.int32:  # PIL's mode I holds 16-bit images
        return part.float() / 65535
    return part if part.dtype == torch.uint8 else to_float(part)


def to_float(image: Tensor) -> Tensor:
    """An image or a batch as float32; integers scaled to [0, 1] by the range of their type."""
    if image.is_floating_point() or image.dtype == torch.bool:
        return image.float()
    return image.float() / torch.iinfo(image.dtype).max
