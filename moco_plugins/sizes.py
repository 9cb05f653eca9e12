"""Sizes of images: one number for a square, or (height, width), in pixels."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

Size = int | tuple[int, int]


def sides(name: str, size: int | Sequence[int]) -> tuple[int, int]:
    """Read a size as (height, width); ``name`` is what it is called in messages.

    Raises:
        ValueError, TypeError: it is none, or a side is below 1.
    """
    both = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    if len(both) != 2 or not all(isinstance(side, numbers.Integral) and not isinstance(side, bool) for side in both):
        raise TypeError(f"{name}={size!r} must be a whole number of pixels, or (height, width)")
    if min(both) < 1:
        raise ValueError(f"{name}={size!r} must be at least 1 pixel")
    return int(both[0]), int(both[1])


def as_size(height: int, width: int) -> Size:
    """The shorter way to write a size."""
    return height if height == width else (height, width)


def at_most(size: Size, most: int) -> Size:
    """A size whose longer side is ``most`` pixels, if it is longer, and of the same shape."""
    height, width = sides("size", size)
    shrink = min(1.0, most / max(height, width))
    return as_size(max(1, round(height * shrink)), max(1, round(width * shrink)))


def parse_size(text: str) -> Size:
    """Read "224" or "32x128", height first.

    Raises:
        ValueError: it is neither.
    """
    height, _, width = text.lower().partition("x")
    return as_size(int(height), int(width or height))


def written(size: int | Sequence[int]) -> str:
    """For readers: "32 x 128"."""
    return " x ".join(map(str, sides("size", size)))
