"""One file as an image: upright, what is seen of it, all values of it."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np

#: PIL's modes of more than 8 bits.
DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
_ORIENTATION = 0x0112  # the EXIF tag


@dataclass(frozen=True)
class Reading:
    """How files are read.

    Args:
        channels: of the images: 1 and 3 are what is seen, 4 keeps the fourth band as it is, others are of arrays.
        value_range: the numbers that become 0 and 1, for images that are not 8-bit; None: the range of their type.
        found_range: the same for floating-point and signed numbers, whose type tells none, where ``value_range`` does not.
        deep: images are float32 tensors from 0 to 1 instead of 8-bit.
    """

    channels: int = 3
    value_range: tuple[float, float] | None = None
    found_range: tuple[float, float] | None = None
    deep: bool = False


def decode(path: str | os.PathLike[str]) -> Any:
    """A file as a PIL image of 8 bits a channel, upright, or as an array (H, W, C) of whatever type it has.

    The first of several pages or frames counts.

    Raises:
        Whatever PIL's decoders and numpy raise.
    """
    import numpy as np
    from PIL import Image, ImageOps, UnidentifiedImageError

    suffix = os.path.splitext(os.fspath(path))[1].lower()
    if suffix == ".npy":
        return _bands_last(np.load(path, allow_pickle=False))
    try:
        with Image.open(path) as image:
            kind = image.format
            image.load()
            if image.getexif().get(_ORIENTATION, 1) != 1:
                image = ImageOps.exif_transpose(image)
            if image.mode not in DEEP:
                return image
            array = np.array(image)
            if image.mode == "I" and kind == "PNG":  # where older Pillows put 16 bits
                array = array.astype(np.uint16)
            return array[..., None]
    except (UnidentifiedImageError, KeyError, SyntaxError, ValueError):
        if suffix not in (".tif", ".tiff"):
            raise
        return _bands_last(_tiff(path))


def _tiff(path: str | os.PathLike[str]) -> np.ndarray[Any, Any]:
    try:
        import tifffile
    except ImportError as error:
        raise ImportError(
            f'{path}: this TIFF has bands that need tifffile: pip install "moco-plugins[bench]"'
        ) from error
    return tifffile.imread(path)


def _bands_last(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(H, W), (H, W, C) or (C, H, W) as (H, W, C): the bands are the shorter of the first and the last axis."""
    if array.ndim == 2:
        return array[..., None]
    if array.ndim != 3 or array.size == 0:
        raise ValueError(f"an array of shape {array.shape} is no image; it must be (H, W), (H, W, C) or (C, H, W)")
    return array.transpose(1, 2, 0) if array.shape[0] < array.shape[2] else array


def read_image(path: str | os.PathLike[str], reading: Reading | None = None) -> Any:
    """A file as an image for views and backbones: PIL, "RGB" or "L", or a tensor (C, H, W), uint8 or float32 from 0 to 1.

    What is transparent is seen on white. Values beyond the range are clipped, with a warning.

    Raises:
        ValueError: it has other channels than are wanted. Others: it is no image, or damaged.
    """
    reading = reading or Reading()
    image = decode(path)
    if not hasattr(image, "mode"):
        made = _of_array(image, reading, path)
        return made if reading.deep or made.dtype == torch.uint8 else (made * 255).round().to(torch.uint8)
    if reading.channels in (1, 3):
        image = seen(image, "L" if reading.channels == 1 else "RGB")
        return _tensor(image).float() / 255 if reading.deep else image
    pixels = _tensor(image if image.mode in ("RGBA", "RGBX", "RGB", "L") else image.convert("RGBA"))
    pixels = _with_channels(pixels, reading.channels, 255, path)
    return pixels.float() / 255 if reading.deep else pixels


def seen(image: Any, mode: str) -> Any:
    """What is seen of a PIL image, as "RGB" or "L": transparent parts are white."""
    from PIL import Image

    if image.mode == mode and "transparency" not in image.info:
        return image
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        image = image.convert("RGBA")
        if image.getextrema()[3][0] < 255:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def _tensor(image: Any) -> Tensor:
    import numpy as np

    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1)))


def _of_array(array: np.ndarray[Any, Any], reading: Reading, path: Any) -> Tensor:
    import numpy as np

    if array.dtype == np.uint8:
        pixels = _with_channels(_tensor(array), reading.channels, 255, path)
        return pixels.float() / 255 if reading.deep else pixels
    low, high = (
        reading.value_range or (reading.found_range if array.dtype.kind in "if" else None) or _of_type(array.dtype)
    )
    values = array.astype(np.float64)
    values = (np.nan_to_num(values, nan=low, posinf=high, neginf=low) - low) / (high - low)
    if values.min() < -1e-6 or values.max() > 1 + 1e-6:
        warnings.warn(
            f"{path} has values from {array.min():g} to {array.max():g}, and what lies beyond {low:g} to {high:g} is "
            "clipped; --value-range LOW,HIGH sets another range"
        )
    return _with_channels(_tensor(values.clip(0, 1).astype(np.float32)), reading.channels, 1, path)


def _of_type(dtype: np.dtype[Any]) -> tuple[float, float]:
    """The range of whole numbers of a type; 0 to 1 for floating-point numbers."""
    import numpy as np

    if dtype.kind not in "iu":
        return 0.0, 1.0
    about = np.iinfo(dtype)
    return float(about.min), float(about.max)


def _with_channels(pixels: Tensor, channels: int, opaque: int, path: Any) -> Tensor:
    have = len(pixels)
    if have == channels:
        return pixels
    if have == 1 and channels in (3, 4):
        pixels, have = pixels.expand(3, -1, -1), 3
    if have == 3 and channels == 4:
        return torch.cat([pixels, torch.full_like(pixels[:1], opaque)])
    if have == 4 and channels == 3:
        return pixels[:3]
    if have in (3, 4) and channels == 1:  # ITU-R 601-2, as PIL's
        grey = (pixels[:3].float() * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(0, keepdim=True)
        return grey.round().to(pixels.dtype) if pixels.dtype == torch.uint8 else grey
    raise ValueError(f"{Path(path).name} has {have} channels, and the images of this set {channels}; see --channels")
