"""Images of any kind as float tensors, one or a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..sizes import Size, sides
from .small_images import kept


def as_float(image: Any) -> Tensor:
    """A PIL image or a tensor as a float tensor; uint8 becomes 0 to 1."""
    if not isinstance(image, Tensor):
        from torchvision.transforms.v2 import functional

        image = functional.to_image(image)
    return image.float() / 255 if image.dtype == torch.uint8 else image.float()


def labels_of(images: Any) -> Tensor:
    """The labels of a data set: (N,), -1 where there is none, or (N, classes).

    Images are only opened where nothing else tells their labels.
    """
    for name in ("labels", "targets"):
        if hasattr(images, name):
            labels = getattr(images, name)
            return torch.full((len(images),), -1) if labels is None else torch.as_tensor(labels).long()
    return _labels([images[index][1] for index in range(len(images))])


def _labels(found: Sequence[Any]) -> Tensor:
    return torch.stack([torch.as_tensor(label).long() for label in found])


def as_batch(images: Any, indices: Sequence[int], image_size: Size | None = None) -> tuple[Tensor, Tensor]:
    """Images by index as one float tensor (N, C, H, W) from 0 to 1, with their labels (-1: none).

    With ``image_size``, a side or (height, width), an image is scaled until it covers that, and the middle is cut out.
    """
    size = image_size or getattr(images, "image_size", None)
    array = kept(images)
    if array is not None:
        rows = torch.as_tensor(list(indices), dtype=torch.long)
        batch = array.images[rows].float() / 255
        return (resized(batch, size) if size else batch), array.labels_of(rows)
    items = [images[index] for index in indices]
    batch = torch.stack([resized(as_float(image), size) if size else as_float(image) for image, _ in items])
    return batch, _labels([label for _, label in items])


def resized(image: Tensor, size: Size) -> Tensor:
    """An image or a batch scaled to cover ``size``, and the middle of it."""
    height, width = sides("image_size", size)
    if image.shape[-2:] == (height, width):
        return image
    from torchvision.transforms.v2 import functional

    grow = max(height / image.shape[-2], width / image.shape[-1])
    whole = [max(height, round(image.shape[-2] * grow)), max(width, round(image.shape[-1] * grow))]
    if height == width:  # as torchvision's evaluation of photographs, to the pixel
        return functional.center_crop(functional.resize(image, [height], antialias=True), [height, width])
    return functional.center_crop(functional.resize(image, whole, antialias=True), [height, width])
