"""Images in files as a data set; files that turn out to be damaged are left out when they are met."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .arrays import DataNotFoundError
from .opening import Reading, read_image


class ImageFiles(Dataset[tuple[Any, Any]]):
    """Images in files: items are (image, label); label -1 where there is none.

    Images are PIL, "RGB" or "L", or tensors (C, H, W), uint8 or float32 from 0 to 1; see :class:`Reading`. In place of a
    file that turns out to be damaged comes the next one that is not, without its label: a batch keeps its size, and
    what a seed gives does not depend on who met the file first. A warning names it, and :attr:`damaged` remembers.

    Args:
        files: the images.
        labels: (N,); (N, classes) of 0 and 1 where an image may have several; or None.
        classes: the names of the classes.
        reading: how they are read; "RGB" and "L" are short for 8 bits of three channels or one.
        image_size: the size to train at, in pixels.
        name: what to call the set in messages.
        statistics: mean and deviation per channel, where they are not those of photographs.
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        labels: Tensor | None,
        classes: Sequence[str],
        reading: Reading | str,
        image_size: int,
        name: str,
        statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    ) -> None:
        self.paths, self.labels, self.classes = [os.fspath(file) for file in files], labels, tuple(classes)
        if isinstance(reading, str):
            reading = Reading(1 if reading == "L" else 3)
        self.reading, self.image_size, self.name, self.statistics = reading, image_size, name, statistics
        self.channels = reading.channels
        # In shared memory: processes that load images tell the one that reports.
        self._met = torch.zeros(len(self.paths), dtype=torch.uint8).share_memory_()
        #: All images, where this set is a part that :func:`moco_plugins.datasets.train_test` has cut from them.
        self.whole: ImageFiles | None = None
        #: Which images (N,) stay on one side of a cut; None: each by itself.
        self.groups: Tensor | None = None
        #: Images of the same folder to train on that have no label.
        self.unlabeled: ImageFiles | None = None
        self._pretrain: ImageFiles | None = None

    @property
    def files(self) -> list[Path]:
        """The images' paths."""
        return [Path(path) for path in self.paths]

    @property
    def damaged(self) -> list[str]:
        """The files that could not be read so far, in any of the processes that load them."""
        return [self.paths[index] for index in self._met.nonzero()[:, 0].tolist()]

    @property
    def pretrain(self) -> ImageFiles | None:
        """These images and those without label, where there are such; None: these are all."""
        if self.unlabeled is None:
            return None
        if self._pretrain is None:
            more = self.unlabeled
            own = self.labels if self.labels is not None else torch.full((len(self),), -1)
            labels = torch.cat([own, own.new_full((len(more), *own.shape[1:]), -1)])
            self._pretrain = self._like([*self.paths, *more.paths], labels)
        return self._pretrain

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index={index}: there are {len(self)} images")
        for step in range(len(self)):
            place = (index + step) % len(self)
            if self._met[place]:
                continue
            try:
                image = read_image(self.paths[place], self.reading)
            except ImportError:
                raise
            except Exception as error:  # PIL raises whatever its decoders raise
                self._met[place] = 1
                warnings.warn(f"{self.paths[place]} cannot be read and is left out ({type(error).__name__}: {error})")
                continue
            return image, self._label(index, step == 0)
        raise DataNotFoundError(f"data: none of the {len(self)} images can be read, such as {self.paths[0]}")

    def _label(self, index: int, known: bool) -> Any:
        if self.labels is None:
            return -1
        label = self.labels[index] if known else torch.full_like(self.labels[index], -1)
        return int(label) if label.ndim == 0 else label

    def subset(self, indices: Tensor | Sequence[int]) -> ImageFiles:
        """The images at ``indices``, as a set of the same kind."""
        rows = torch.as_tensor(indices, dtype=torch.long)
        labels = self.labels[rows] if self.labels is not None else None
        part = self._like([self.paths[i] for i in rows.tolist()], labels)
        part.groups = None if self.groups is None else self.groups[rows]
        return part

    def _like(self, paths: Sequence[str], labels: Tensor | None) -> ImageFiles:
        return ImageFiles(paths, labels, self.classes, self.reading, self.image_size, self.name, self.statistics)
