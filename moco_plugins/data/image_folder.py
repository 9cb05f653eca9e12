"""A folder of images as a data set: with classes (one folder each) or without; broken files are left out and named."""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .arrays import DataNotFoundError
from .splits import train_test

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
#: Up to this many files each one is decoded when the folder is opened; above, only its header is read.
DECODE_UP_TO = 20_000
_LOOK_AT = 200  # images whose size and colours decide for all


class ImageFiles(Dataset[tuple[Any, int]]):
    """Images in files: items are (PIL image, label); label -1 where there is none.

    Args:
        files: the images.
        labels: (N,) or None.
        classes: the names of the classes.
        mode: PIL's mode of the images, "RGB" or "L".
        image_size: the size to train at, in pixels.
        name: what to call the set in messages.
    """

    def __init__(
        self,
        files: Sequence[Path],
        labels: Tensor | None,
        classes: Sequence[str],
        mode: str,
        image_size: int,
        name: str,
    ) -> None:
        self.files, self.labels, self.classes = list(files), labels, tuple(classes)
        self.mode, self.image_size, self.name = mode, image_size, name
        self.channels = 1 if mode == "L" else 3
        #: All images, where this set is a part that :func:`moco_plugins.datasets.train_test` has cut from them.
        self.whole: ImageFiles | None = None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        with Image.open(self.files[index]) as image:
            return image.convert(self.mode), int(self.labels[index]) if self.labels is not None else -1

    def subset(self, indices: Tensor | Sequence[int]) -> ImageFiles:
        """The images at ``indices``, as a set of the same kind."""
        rows = torch.as_tensor(indices, dtype=torch.long)
        labels = self.labels[rows] if self.labels is not None else None
        files = [self.files[i] for i in rows.tolist()]
        return ImageFiles(files, labels, self.classes, self.mode, self.image_size, self.name)


def image_folder(path: str | os.PathLike[str]) -> tuple[ImageFiles, ImageFiles]:
    """Open a folder of images as (train, test).

    ``path`` holds ``train`` and ``test`` (or ``val``), or images that are split here, four fifths to one fifth, the
    same for every run. Below that, one folder for each class, or images without classes. The size to train at is the
    median of the shorter sides, at most 224; the images are grey if all those looked at are.

    Raises:
        DataNotFoundError: there is no such folder, or no image in it.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise DataNotFoundError(f"data={str(path)!r}: {root.resolve()} is not a folder; give one that holds images")
    held = next((root / part for part in ("test", "val", "valid", "validation") if (root / part).is_dir()), None)
    if (root / "train").is_dir() and held is not None:
        train, test = _scan(root / "train"), _scan(held)
        classes = sorted({*train[1], *test[1]})
        parts = [(files, _numbers(names, classes)) for files, names in (train, test)]
        mode, size = _look(train[0])
        return (
            ImageFiles(*parts[0], classes, mode, size, root.name),
            ImageFiles(*parts[1], classes, mode, size, root.name),
        )
    files, names = _scan(root)
    classes = sorted(set(names))
    if len(files) < 10:
        raise DataNotFoundError(
            f"data={str(path)!r}: only {len(files)} readable images in {root.resolve()}; 10 are the least"
        )
    mode, size = _look(files)
    return train_test(ImageFiles(files, _numbers(names, classes), classes, mode, size, root.name))


def _numbers(names: list[str], classes: list[str]) -> Tensor | None:
    if not names:
        return None
    number = {name: i for i, name in enumerate(classes)}
    return torch.tensor([number[name] for name in names])


def _scan(folder: Path) -> tuple[list[Path], list[str]]:
    """All readable images below ``folder`` with the names of their classes; no names where there are no classes."""
    files = sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if not files:
        raise DataNotFoundError(f"data: no image ({', '.join(SUFFIXES)}) in {folder.resolve()} or below")
    decode = len(files) <= DECODE_UP_TO
    with ThreadPoolExecutor(min(16, (os.cpu_count() or 1) + 4)) as pool:
        good = list(pool.map(lambda file: _readable(file, decode), files))
    broken = [file for file, ok in zip(files, good, strict=True) if not ok]
    if broken:
        shown = ", ".join(str(file.relative_to(folder)) for file in broken[:10])
        more = f" and {len(broken) - 10} more" if len(broken) > 10 else ""
        warnings.warn(f"{folder}: {len(broken)} of {len(files)} images cannot be read and are left out: {shown}{more}")
    files = [file for file, ok in zip(files, good, strict=True) if ok]
    if any(file.parent == folder for file in files):  # images lie beside the folders: these are not classes
        return files, []
    return files, [file.relative_to(folder).parts[0] for file in files]


def _readable(file: Path, decode: bool) -> bool:
    from PIL import Image

    try:
        with Image.open(file) as image:
            if decode:
                image.load()
            else:
                image.verify()
    except Exception:  # PIL raises whatever its decoders raise
        return False
    return True


def _look(files: list[Path]) -> tuple[str, int]:
    """The mode and the size to train at, from some of the images."""
    from PIL import Image

    step = max(1, len(files) // _LOOK_AT)
    sides, grey = [], True
    for file in files[::step]:
        with Image.open(file) as image:
            sides.append(min(image.size))
            grey = grey and image.mode in ("L", "1", "I;16")
    return "L" if grey else "RGB", min(224, int(statistics.median(sides)))
