"""What some of a folder's files tell of all: channels, size, range of values, and whether these are more than 8 bits."""

from __future__ import annotations

import os
import statistics
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .arrays import DataNotFoundError
from .opening import DEEP, Reading, decode, read_image

#: Files whose headers decide for all, and files whose values do.
_LOOK_AT, _READ = 200, 50
#: The sizes that a folder's images are trained at without further word.
_SMALLEST, _LARGEST = 8, 224
_LONG = 1.6  # times as long as wide: more than photographs


class Look(NamedTuple):
    """How the files of a set are read, the size to train at, and mean and deviation where they have their own."""

    reading: Reading
    image_size: int
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None


class _Header(NamedTuple):
    path: str
    bands: int
    height: int
    width: int
    kind: str  # of its numbers: "u1" for 8 bits, "u2", "i4", "f4", ...
    array: bool


def look(files: Sequence[str], channels: int | None = None, value_range: tuple[float, float] | None = None) -> Look:
    """Look at some files, evenly from all.

    Without ``channels``: 1 where all are grey, the bands of arrays where these are not those of an image, else 3.
    Without ``value_range``, floating-point and signed numbers have the range that is found here, and a warning tells it.

    Raises:
        DataNotFoundError: none can be read.
    """
    step = max(1, len(files) // _LOOK_AT)
    headers = [header for header in map(_header, files[::step]) if header is not None]
    if not headers:
        raise DataNotFoundError(f"data: none of the images that were tried can be read, such as {files[0]}")
    if channels is None:
        bands = Counter(header.bands for header in headers)
        odd = any(header.array and header.bands not in (1, 3) for header in headers)
        channels = bands.most_common(1)[0][0] if odd else 1 if set(bands) == {1} else 3
    deep = [header for header in headers if header.kind != "u1"]
    found = _values(deep) if deep and value_range is None else None
    reading = Reading(channels, value_range, found, bool(deep))
    sides = [min(header.height, header.width) for header in headers]
    size = max(_SMALLEST, min(_LARGEST, int(statistics.median(sides))))
    _tell_shape(headers, size)
    own = _own_statistics(headers, reading) if deep or channels not in (1, 3) else None
    return Look(reading, size, own)


def _header(path: str) -> _Header | None:
    import numpy as np
    from PIL import Image

    try:
        if path.lower().endswith(".npy"):
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            return _of_array(path, array)
        try:
            with Image.open(path) as image:
                width, height = image.size
                if image.mode in DEEP:
                    kind = {"F": "f4", "I": "u2" if image.format == "PNG" else "i4"}.get(image.mode, "u2")
                    return _Header(path, 1, height, width, kind, False)
                grey = image.mode in ("1", "L", "LA", "La")
                return _Header(path, 1 if grey else 3, height, width, "u1", False)
        except Exception:
            if not path.lower().endswith((".tif", ".tiff")):
                raise
            return _of_array(path, decode(path))
    except ImportError:
        raise
    except Exception:  # damaged: whoever reads it says so
        return None


def _of_array(path: str, array: Any) -> _Header:
    shape = array.shape if array.ndim == 3 else (*array.shape, 1)
    if shape[0] < shape[2]:
        shape = (shape[1], shape[2], shape[0])
    height, width, bands = shape
    return _Header(path, bands, height, width, f"{array.dtype.kind}{array.dtype.itemsize}", True)


def _values(deep: Sequence[_Header]) -> tuple[float, float] | None:
    """The range of floating-point and signed numbers, as some of them are; says what it is."""
    import numpy as np

    untold = [header for header in deep if header.kind[0] not in "ub"]
    if not untold:
        _tell_unused(deep)
        return None
    step = max(1, len(untold) // _READ)
    low, high = np.inf, -np.inf
    for header in untold[::step]:
        try:
            values = np.asarray(decode(header.path), dtype=np.float64)
        except Exception:
            continue
        values = values[np.isfinite(values)]
        if values.size:
            low, high = min(low, float(values.min())), max(high, float(values.max()))
    if not low < high:
        return None
    shown = (low, high)
    whole = all(header.kind[0] == "i" for header in untold)
    if low >= 0:
        for top in (255.0, 65535.0) if whole else (1.0,):
            if high <= top:
                shown = (0.0, top)
                break
    warnings.warn(
        f"The images hold {'whole' if whole else 'floating-point'} numbers from {low:g} to {high:g}, as far as was looked: "
        f"{shown[0]:g} is black and {shown[1]:g} white; --value-range LOW,HIGH sets another range."
    )
    return shown


def _tell_unused(deep: Sequence[_Header]) -> None:
    import numpy as np

    highest, top = 0, 1
    for header in deep[:: max(1, len(deep) // _READ)]:
        try:
            values = decode(header.path)
        except Exception:
            continue
        if values.dtype.kind == "u":
            highest, top = max(highest, int(values.max())), int(np.iinfo(values.dtype).max)
    if 0 < highest < top / 8:
        warnings.warn(
            f"The images have room for values up to {top}, and those looked at reach {highest}: they are dark; "
            f"--value-range 0,{highest} uses all of the range."
        )


def _tell_shape(headers: Sequence[_Header], size: int) -> None:
    long = [
        header for header in headers if max(header.height, header.width) >= _LONG * min(header.height, header.width)
    ]
    if len(long) > len(headers) / 2:
        height, width = (int(statistics.median(getattr(one, side) for one in long)) for side in ("height", "width"))
        warnings.warn(
            f"Most images are far from square ({height} x {width} pixels): accuracy is measured on the middle {size} x {size} "
            f"of them, scaled; --image-size HEIGHTxWIDTH, such as {height}x{width}, shows them whole."
        )


def _own_statistics(headers: Sequence[_Header], reading: Reading) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    from .images import as_float

    pixels = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whoever trains on the image hears of it
        for header in headers[:: max(1, len(headers) // _READ)]:
            try:
                image = as_float(read_image(header.path, reading))
            except Exception:
                continue
            pixels.append(image.flatten(1)[:, :: max(1, image[0].numel() // 10_000)].double())
    if not pixels:
        return None
    mean = torch.stack([part.mean(1) for part in pixels]).mean(0)
    square = torch.stack([part.square().mean(1) for part in pixels]).mean(0)
    std = (square - mean**2).clamp_min(1e-6).sqrt()
    return tuple(round(float(m), 6) for m in mean), tuple(round(float(s), 6) for s in std)


def absolute(root: os.PathLike[str] | str, names: Sequence[str]) -> list[str]:
    """The paths of files that are named from ``root`` on."""
    start = os.path.join(root, "")
    return [start + name for name in names]
