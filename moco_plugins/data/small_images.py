"""Small images of one size: to the training they are a batch, wherever they come from, and a folder of them an array."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .arrays import ImageArray
from .image_files import ImageFiles
from .telling import Told

#: Pixels of the longer side. Up to here making views of a batch is cheaper than cutting them out one by one.
SMALL = 64
#: Bytes of pixels of a folder that are kept at most; larger ones are read again each epoch, and give the same views.
AT_MOST = 2**30
_PROBED = 16

_kept: WeakKeyDictionary[ImageFiles, ImageArray | None] = WeakKeyDictionary()


def kind_of(image: Any) -> Hashable | None:
    """What images must have in common to be stacked: type and shape; None of an image that is not small."""
    if isinstance(image, Tensor):
        return (image.dtype, image.shape) if image.ndim == 3 and max(image.shape[1:]) <= SMALL else None
    if getattr(image, "mode", None) in ("RGB", "L"):
        return (image.mode, image.size) if max(image.size) <= SMALL else None
    return None


def stacked(images: list[Any]) -> Tensor:
    """Images of one kind as a batch (N, C, H, W); PIL's as uint8."""
    if isinstance(images[0], Tensor):
        return torch.stack(images)
    import numpy as np

    batch = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return batch[:, None] if batch.ndim == 3 else batch.permute(0, 3, 1, 2).contiguous()


def in_memory(images: Any) -> ImageArray | None:
    """The images as an array: of a folder of 8-bit ones, all small and of one size, which are read once; else None.

    Labels are those of the items: an image in place of a damaged one has none.
    """
    if isinstance(images, ImageArray):
        return images
    if not isinstance(images, ImageFiles):
        return None
    if images not in _kept:
        _kept[images] = _read(images)
    return _kept[images]


def kept(images: Any) -> ImageArray | None:
    """What :func:`in_memory` has found, where it has been asked; nothing is read."""
    return images if isinstance(images, ImageArray) else _kept.get(images) if isinstance(images, ImageFiles) else None


def _read(images: ImageFiles) -> ImageArray | None:
    count = len(images)
    if not count or images.reading.deep:
        return None
    probe = [images[place][0] for place in range(0, count, -(-count // _PROBED))]
    kind = kind_of(probe[0])
    if kind is None or any(kind_of(image) != kind for image in probe):
        return None
    first = stacked(probe[:1])
    if first.dtype != torch.uint8 or count * first.numel() > AT_MOST:
        return None
    pixels, labels = first.new_empty(count, *first.shape[1:]), list[Tensor]()
    said = Told(f"reading the small images of {images.name}", count)
    for place in range(count):
        image, label = images[place]
        if kind_of(image) != kind:
            return None
        pixels[place] = stacked([image])[0]
        labels.append(torch.as_tensor(label))
        said(place)
    return ImageArray(pixels, torch.stack(labels), images.classes, images.name)
