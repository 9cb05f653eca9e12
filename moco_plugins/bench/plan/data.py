"""The data set of a comparison, loaded, with what the harness must know of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...data.arrays import ImageArray
from ...data.images import as_float
from ...data.seeding import key
from ...data.splits import to_learn_from, train_test
from ...hooks import manager as plugins
from ...sizes import Size, as_size
from .errors import SettingsError


@dataclass(frozen=True)
class Data:
    """A loaded data set.

    ``labelled``: accuracy can be measured, that is, all images have labels and there are two classes or more.
    ``notes``: what the reader of the results must know of it. ``more``: images that are learnt from in place of those of
    ``train``, and ``learnt_from`` the name of their set, where it is another one.
    """

    name: str
    train: Any
    test: Any
    channels: int
    image_size: Size
    labelled: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...] = ()
    more: Any = None
    learnt_from: str | None = None

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes, where the set tells them."""
        return list(getattr(self.train, "classes", ()))

    @property
    def pretrain(self) -> Any:
        """The images that methods learn from: those of ``train``, and more where the set has more without labels."""
        return to_learn_from(self.train) if self.more is None else self.more

    @property
    def cut_by_seed(self) -> bool:
        """Whether each seed has a split of its own: not where the set comes with one."""
        return getattr(self.train, "whole", None) is not None

    def of_seed(self, seed: int) -> Data:
        """The data as a seed sees them. Seed 0 has the split that the set's name stands for."""
        if seed == 0 or not self.cut_by_seed:
            return self
        train, test = train_test(self.train.whole, key(seed, "split"))
        mean, std = _statistics(train, self.channels) if self.more is None else (self.mean, self.std)
        return replace(self, train=train, test=test, mean=mean, std=std)


def load_data(name: str, root: str | None, image_size: Size | None, knn_k: int) -> Data:
    """Load a data set by name, or a folder of images.

    Raises:
        UnknownNameError, DataNotFoundError: there is none.
        SettingsError: it is too small to train and test on.
    """
    given, path = name, Path(name).expanduser()
    if name not in plugins.datasets() and path.exists():
        name, root = "imagefolder", given
    elif name not in plugins.datasets() and (path.is_absolute() or "/" in name):
        raise SettingsError(f"data={name!r}: there is no such folder (looked for {path.resolve()})")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        train, test = plugins.dataset_factory(name)(root)
    if len(train) < 10 or len(test) < 2:
        raise SettingsError(f"data={given!r} has {len(train)} training and {len(test)} test images: too few")
    channels, height, width = as_float(train[0][0]).shape
    mean, std = _statistics(train, channels)
    labelled, notes = _labels(train, test)
    notes += [str(warning.message) for warning in caught if warning.category is UserWarning]
    if labelled and knn_k > len(train):
        notes.append(
            f"kNN asks for k = {knn_k} neighbours and there are {len(train)} training images: all of them vote."
        )
    if labelled and len(test) < knn_k:
        notes.append(
            f"There are only {len(test)} test images: accuracy moves in steps of {100 / len(test):.1f} points."
        )
    size = image_size or getattr(train, "image_size", None) or as_size(height, width)
    shown = path.resolve().name if name == "imagefolder" and given == root else given
    return Data(shown, train, test, channels, size, labelled, mean, std, tuple(notes))


def _labels(train: Any, test: Any) -> tuple[bool, list[str]]:
    parts = [part_labels(part) for part in (train, test)]
    if any(int(labels.min()) < 0 for labels in parts):
        return False, ["The images have no labels: accuracy is left out."]
    if len(torch.unique(parts[0])) < 2:
        return False, ["All training images are of one class: accuracy is left out."]
    return True, []


def part_labels(images: Any) -> Tensor:
    """The labels of a data set, -1 where there is none; images are only opened where it does not hold its labels."""
    if hasattr(images, "labels"):
        labels = images.labels
        return torch.full((len(images),), -1) if labels is None else torch.as_tensor(labels).long()
    return torch.tensor([int(images[index][1]) for index in range(len(images))])


def _statistics(train: Any, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel: of the images where they are in memory, else ImageNet's."""
    if isinstance(train, ImageArray):
        some = train.images[:10_000].float() / 255
        means, stds = some.mean((0, 2, 3)), some.std((0, 2, 3)).clamp_min(1e-3)
        return tuple(round(float(m), 4) for m in means), tuple(round(float(s), 4) for s in stds)
    from ...core.views import IMAGENET_MEAN, IMAGENET_STD

    return (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,) * channels, (0.25,) * channels)
