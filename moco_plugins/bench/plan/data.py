"""The data set of a comparison, loaded, with what the harness must know of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...data.arrays import ImageArray
from ...data.image_folder import image_folder
from ...data.images import as_float, labels_of
from ...data.seeding import key
from ...data.splits import to_learn_from, train_test
from ...hooks import manager as plugins
from ...sizes import Size, as_size
from .errors import SettingsError


@dataclass(frozen=True)
class Data:
    """A loaded data set.

    ``labelled``: accuracy can be measured, that is, all images have labels and there are two classes or more. ``measure``:
    what that is, "top1", or "map" (mean average precision) where images have several labels.
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
    measure: str = "top1"

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

    @property
    def damaged(self) -> list[str]:
        """The files that turned out to be damaged when they were met, so far."""
        parts = (self.train, self.test, self.pretrain)
        return sorted({path for part in parts for path in getattr(part, "damaged", ())})

    def of_seed(self, seed: int) -> Data:
        """The data as a seed sees them. Seed 0 has the split that the set's name stands for."""
        if seed == 0 or not self.cut_by_seed:
            return self
        train, test = train_test(self.train.whole, key(seed, "split"))
        mean, std = _statistics(train, self.channels) if self.more is None else (self.mean, self.std)
        return replace(self, train=train, test=test, mean=mean, std=std)


@dataclass(frozen=True)
class FolderOptions:
    """How a folder of images is read and cut; see :func:`moco_plugins.data.image_folder.image_folder`."""

    channels: int | None = None
    value_range: tuple[float, float] | None = None
    groups: str | None = None


def load_data(
    name: str, root: str | None, image_size: Size | None, knn_k: int, options: FolderOptions | None = None
) -> Data:
    """Load a data set by name, or a folder of images.

    Raises:
        UnknownNameError, DataNotFoundError: there is none.
        SettingsError: it is too small to train and test on, or no folder and read as one.
    """
    given, path = name, Path(name).expanduser()
    if name not in plugins.datasets() and path.exists():
        name, root = "imagefolder", given
    elif name not in plugins.datasets() and (path.is_absolute() or "/" in name):
        raise SettingsError(f"data={name!r}: there is no such folder (looked for {path.resolve()})")
    factory = plugins.dataset_factory(name)
    given_options = {key: value for key, value in vars(options or FolderOptions()).items() if value is not None}
    if given_options and name != "imagefolder":
        option = next(iter(given_options)).replace("_", "-")
        raise SettingsError(f"--{option}: data={given!r} is not a folder of images; it is read as it comes")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        train, test = image_folder(root, **given_options) if given_options and root is not None else factory(root)
    if len(train) < 10 or len(test) < 2:
        raise SettingsError(f"data={given!r} has {len(train)} training and {len(test)} test images: too few")
    channels, height, width = as_float(train[0][0]).shape
    mean, std = _statistics(train, channels)
    labelled, measure, notes = _labels(train, test)
    notes += [str(warning.message) for warning in caught if warning.category is UserWarning]
    if labelled and knn_k > len(train):
        notes.append(
            f"kNN asks for k = {knn_k} neighbours and there are {len(train)} training images: all of them vote."
        )
    if labelled and measure == "top1" and len(test) < knn_k:
        notes.append(
            f"There are only {len(test)} test images: accuracy moves in steps of {100 / len(test):.1f} points."
        )
    size = image_size or getattr(train, "image_size", None) or as_size(height, width)
    shown = path.resolve().name if name == "imagefolder" and given == root else given
    return Data(shown, train, test, channels, size, labelled, mean, std, tuple(notes), measure=measure)


def _labels(train: Any, test: Any) -> tuple[bool, str, list[str]]:
    """Whether there is something to measure, what, and what is to be said of it."""
    parts = [labels_of(part) for part in (train, test)]
    if any(int(labels.min()) < 0 for labels in parts):
        return False, "top1", ["The images have no labels: accuracy is left out."]
    if parts[0].ndim > 1:
        if not bool((parts[0].any(0) & ~parts[0].all(0) & parts[1].any(0)).any()):
            return False, "map", ["No class has images in it and not in it: accuracy is left out."]
        bare = int((~parts[0].any(1)).sum() + (~parts[1].any(1)).sum())
        without = f" {bare} images are of no class." if bare else ""
        return (
            True,
            "map",
            [f"Images may have several labels: what is measured is the mean average precision (mAP).{without}"],
        )
    if len(torch.unique(parts[0])) < 2:
        return False, "top1", ["All training images are of one class: accuracy is left out."]
    return True, "top1", []


def _statistics(train: Any, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel: of the images where they are in memory or no photographs, else ImageNet's."""
    own = getattr(train, "statistics", None)
    if own is not None:
        return own
    if isinstance(train, ImageArray):
        some = train.images[:10_000].float() / 255
        means, stds = some.mean((0, 2, 3)), some.std((0, 2, 3)).clamp_min(1e-3)
        return tuple(round(float(m), 4) for m in means), tuple(round(float(s), 4) for s in stds)
    from ...core.views import IMAGENET_MEAN, IMAGENET_STD

    return (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,) * channels, (0.25,) * channels)
