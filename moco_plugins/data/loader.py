"""Batches of view pairs, the same for every engine and after every resume.

The order of the images, their views and the method's own random draws are functions of (seed, epoch, batch number,
rank) alone: nothing depends on how many random numbers an engine, an evaluation or an interrupted run has used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..steps import distributed
from .arrays import ImageArray
from .images import as_batch, as_float
from .seeding import key, random_state
from .small_images import in_memory, kind_of, stacked

_Numbered = tuple[tuple[Tensor, ...], Tensor, Tensor]


class Place(list[int]):
    """The indices of a batch, and its place in the training, which travels with them into worker processes."""

    def __init__(self, indices: Sequence[int], epoch: int, number: int, rank: int) -> None:
        super().__init__(indices)
        self.epoch, self.number, self.rank = epoch, number, rank

    def __reduce__(self) -> tuple[Any, ...]:
        return Place, (list(self), self.epoch, self.number, self.rank)


class EpochBatches(Sampler[list[int]]):
    """Batches of a seeded shuffle of ``size`` items, a new one each epoch; the rest that fills no batch is left out.

    ``batch_size`` counts the images of all processes together: each takes its slice of every batch. ``limit``, where it
    is set, is the number of batches after which an epoch ends.
    """

    limit: int | None = None

    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        if batch_size < 2:
            raise ValueError(f"batch_size={batch_size} must be at least 2")
        if size < batch_size:
            raise ValueError(
                f"batch_size={batch_size} is larger than the training set of {size} images; use at most {size}"
            )
        self.size, self.batch_size, self.seed, self.epoch, self.first = size, batch_size, seed, 0, 0
        self.sampler = self  # both Lightning and MMEngine look here for set_epoch

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Choose the shuffle; epochs count from 0. ``first`` is the batch to begin with, where an epoch is resumed."""
        self.epoch, self.first = epoch, first

    def __len__(self) -> int:
        whole = self.size // self.batch_size
        return whole if self.limit is None else min(whole, self.limit)

    def __iter__(self) -> Iterator[list[int]]:
        rank, ranks = distributed.rank(), distributed.world_size()
        if self.batch_size % ranks:
            raise ValueError(f"batch_size={self.batch_size} cannot be shared evenly by {ranks} processes")
        share = self.batch_size // ranks
        generator = torch.Generator().manual_seed(key(self.seed, "order", self.epoch))
        order = torch.randperm(self.size, generator=generator)
        for number in range(self.first, len(self)):
            start = number * self.batch_size + rank * share
            yield Place(order[start : start + share].tolist(), self.epoch, number, rank)


class ViewPairs(Dataset[_Numbered]):
    """A data set whose batches are ``((view, view), labels, image numbers)``.

    Views with ``crop`` and ``finish``, such as :class:`moco_plugins.TwoViews`, are made of a whole batch at once where its
    images are an array, or small and of one size; else each image is cut out by itself, and the rest is done to the batch.
    Folders of such small images are read once and kept, where they are not too large for that: the views are the same.

    Args:
        images: a map-style set of (image, label), or an :class:`moco_plugins.datasets.ImageArray`.
        views: image -> (view, view), or, with a true attribute ``batched``, images (N, C, H, W) -> (views, views).
        finish: applied to each batch of views, normalisation as a rule.
        seed: with the epoch, the batch number and the rank it decides all draws.
    """

    #: Batches are handed on as they are loaded, and :meth:`complete` is left to whoever has the device.
    only_load = False

    def __init__(self, images: Any, views: Callable[[Any], Any], finish: Callable[[Tensor], Tensor], seed: int) -> None:
        self.images, self.views, self.finish, self.seed = images, views, finish, seed
        self.array = in_memory(images) if takes_batches(views) else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> _Numbered:
        return self.__getitems__(Place([index], 0, index, 0))

    def __getitems__(self, indices: list[int]) -> _Numbered:
        """Make the views of a whole batch."""
        place = indices if isinstance(indices, Place) else Place(indices, 0, indices[0], 0)
        loaded, labels = self.load(place)
        return loaded if self.only_load else self.complete(loaded, place), labels, torch.tensor(list(place))

    def load(self, place: Place) -> tuple[tuple[Tensor, ...], Tensor]:
        """What must be done image by image: a batch of images, or one for each view, and the labels."""
        if self.array is not None and self._in_halves:
            rows = torch.as_tensor(list(place), dtype=torch.long)
            return (self.array.images[rows],), self.array.labels_of(rows)
        if takes_batches(self.views) and not self._in_halves:
            images, labels = as_batch(self.images, place)
            return (images,), labels
        make = self.views.crop if self._in_halves else self.views  # type: ignore[attr-defined]
        made, numbers, alike = list[Any](), list[Tensor](), list[Any]()
        with self._draws("views", place):
            for index in place:
                image, label = self.images[index]
                numbers.append(torch.as_tensor(label))
                kind = kind_of(image) if self._in_halves and not made else None
                if kind is not None and (not alike or kind == kind_of(alike[0])):
                    alike.append(image)
                else:
                    made += [make(one) for one in [*alike, image]]
                    alike = []
        if alike:
            return (stacked(alike),), torch.stack(numbers)
        return tuple(torch.stack(list(half)) for half in zip(*made, strict=True)), torch.stack(numbers)

    def complete(self, loaded: tuple[Tensor, ...], place: Place) -> tuple[Tensor, ...]:
        """The views of a batch from what was loaded of it, on the device where that is."""
        views: Any = self.views
        if len(loaded) == 1:
            with self._draws("views", place):
                loaded = views(loaded[0])
        elif self._in_halves:
            with self._draws("looks", place):
                loaded = tuple(views.finish(half, number) for number, half in enumerate(loaded))
        return tuple(self.finish(as_float(half)) for half in loaded)

    @property
    def _in_halves(self) -> bool:
        return _has_halves(self.views)

    def _draws(self, what: str, place: Place) -> AbstractContextManager[None]:
        return random_state(key(self.seed, what, place.epoch, place.number, place.rank))


class StepLoader(DataLoader[Any]):
    """The training loader: yields ``((view, view), labels)`` and seeds the method's own draws of each step.

    ``on_batch`` is told the image numbers of each batch before it is yielded (for a memory bank), ``on_start`` when an
    epoch begins. ``device``, where an engine sets it, is where the views are made of what was loaded; on the CPU it is
    done where it is loaded, in worker processes if there are any.
    """

    device: torch.device | None = None
    on_batch: Callable[[Tensor], None] | None = None
    on_start: Callable[[], None] | None = None
    #: Batches are ``(views, labels, image numbers)``.
    with_ids = False

    def __iter__(self) -> Any:
        batches: Any = self.batch_sampler
        pairs: Any = self.dataset
        epoch, rank = batches.epoch, distributed.rank()
        pairs.only_load = self.device is not None and self.device.type != "cpu"
        if self.on_start is not None:
            self.on_start()
        for number, (views, labels, indices) in enumerate(super().__iter__(), start=batches.first):
            if pairs.only_load:
                there = tuple(part.to(self.device, non_blocking=True) for part in views)
                views = pairs.complete(there, Place(indices.tolist(), epoch, number, rank))
            torch.manual_seed(key(batches.seed, "step", epoch, number, rank))
            if self.on_batch is not None:
                self.on_batch(indices)
            yield (views, labels, indices) if self.with_ids else (views, labels)

    def of_one_process(self, processes: int, limit: int) -> StepLoader:
        """A loader of the share that one of several processes has, which ends its epochs after ``limit`` batches."""
        pairs: Any = self.dataset
        whole: Any = self.batch_sampler
        share = max(2, whole.batch_size // processes)
        loader = make_loader(pairs.images, pairs.views, pairs.finish, share, pairs.seed, self.num_workers)
        loader.batch_sampler.limit = limit  # type: ignore[union-attr]
        return loader


def _as_it_is(batch: Any) -> Any:
    return batch


def _has_halves(views: Any) -> bool:
    return hasattr(views, "crop") and hasattr(views, "finish")


def takes_batches(views: Any) -> bool:
    """Whether views are made of a whole batch at once."""
    return bool(getattr(views, "batched", False)) or _has_halves(views)


def fitting_workers(images: Any, views: Callable[[Any], Any], processes: int = 1) -> int:
    """How many processes should load: none where batches come from memory, else one a core, at most eight a process.

    Args:
        images: the data set.
        views: what is made of it.
        processes: that train on this machine and share its cores.
    """
    if isinstance(images, ImageArray) or (takes_batches(views) and in_memory(images) is not None):
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // processes))


def make_loader(
    images: Any,
    views: Callable[[Any], Any],
    finish: Callable[[Tensor], Tensor],
    batch_size: int,
    seed: int,
    workers: int = 0,
) -> StepLoader:
    """Build the training loader of one run; ``batch_size`` counts the images of all processes together."""
    return StepLoader(
        ViewPairs(images, views, finish, seed),
        batch_sampler=EpochBatches(len(images), batch_size, seed),
        collate_fn=_as_it_is,
        num_workers=workers,
        persistent_workers=workers > 0,
        generator=torch.Generator().manual_seed(key(seed, "workers")),
    )
