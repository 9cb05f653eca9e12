"""Images that are whole in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..sizes import as_size


class DataNotFoundError(FileNotFoundError):
    """A data set is not on disk, or the package that carries it is not installed; says how to get it."""


class ImageArray(Dataset[tuple[Tensor, Any]]):
    """Images in memory: items are (uint8 image (C, H, W), label); label -1 where there is none.

    Args:
        images: (N, C, H, W), uint8.
        labels: (N,), int64, -1 where there is none; (N, classes) of 0 and 1 where an image may have several; or None.
        classes: the names of the classes.
        name: what to call the set in messages.
    """

    def __init__(
        self, images: Tensor, labels: Tensor | None, classes: Sequence[str] = (), name: str = "images"
    ) -> None:
        if images.ndim != 4 or images.dtype != torch.uint8:
            raise ValueError(
                f"images has shape {tuple(images.shape)}, dtype {images.dtype}; it must be (N, C, H, W) uint8"
            )
        if labels is not None and len(labels) != len(images):
            raise ValueError(f"labels has {len(labels)} entries and images {len(images)}; each image needs one")
        self.images, self.name, self.classes = images, name, tuple(classes)
        self.labels = labels.long() if labels is not None else None
        self.channels, self.image_size = images.shape[1], as_size(*images.shape[2:])
        #: All images, where this set is a part that :func:`train_test` has cut from them.
        self.whole: ImageArray | None = None
        #: Which images (N,) stay on one side of a cut; None: not looked for yet.
        self.groups: Tensor | None = None
        #: More images to train on than have labels; None: these are all.
        self.pretrain: ImageArray | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        if self.labels is None:
            return self.images[index], -1
        label = self.labels[index]
        return self.images[index], int(label) if label.ndim == 0 else label

    def labels_of(self, rows: Tensor) -> Tensor:
        """The labels of some images, -1 where there is none."""
        return self.labels[rows] if self.labels is not None else torch.full((len(rows),), -1)

    def subset(self, indices: Tensor | Sequence[int]) -> ImageArray:
        """The images at ``indices``, as a set of the same kind."""
        rows = torch.as_tensor(indices, dtype=torch.long)
        labels = self.labels[rows] if self.labels is not None else None
        part = ImageArray(self.images[rows], labels, self.classes, self.name)
        part.groups = None if self.groups is None else self.groups[rows]
        return part
