"""A folder of images as a data set: with classes (one folder each) or without, split or to be cut here."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .arrays import DataNotFoundError
from .grouping import copied, joined, named_groups, numbered
from .image_files import ImageFiles as ImageFiles
from .kept import DAMAGED, Kept
from .labels import labels_of_parts
from .listing import SUFFIXES, Listing, list_images
from .looking import absolute, look
from .splits import train_test

#: Up to this many files of a set that comes split each is read when the folder is opened; those of a set that is cut
#: here always are, once: copies must be found. Others are found to be damaged when they are met.
READ_UP_TO = 2000
_HELD_OUT = ("test", "val", "valid", "validation")
_UNLABELED = ("unlabeled", "unlabelled")


def image_folder(
    path: str | os.PathLike[str],
    channels: int | None = None,
    value_range: tuple[float, float] | None = None,
    groups: str | None = None,
) -> tuple[ImageFiles, ImageFiles]:
    """Open a folder of images as (train, test).

    ``path`` holds ``train`` and ``test`` (or ``val``), or images that are split here, four fifths to one fifth, the
    same for every run, exact copies never on both sides. Below that, one folder for each class, or images without
    classes. ``unlabeled`` beside ``train`` is learnt from as well. The size to train at is the median of the shorter
    sides, 8 to 224; the images are grey if all those looked at are.

    Hidden parts of paths are left out; links are followed. What a reader should know comes as a warning.

    Args:
        path: the folder.
        channels: of the images; None: 1 or 3, or the bands of arrays. 4 keeps a fourth band or the transparency.
        value_range: the numbers that are black and white in images that are not 8-bit; None: the range of their type.
        groups: which images stay on one side of a cut; see :func:`moco_plugins.data.grouping.named_groups`.

    Raises:
        DataNotFoundError: there is no such folder, or no image in it.
        ValueError: ``groups`` misses images, or a value that cannot be.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        raise DataNotFoundError(f"data={str(path)!r}: {root.resolve()} is not a folder; give one that holds images")
    if channels is not None and channels < 1:
        raise ValueError(f"channels={channels} must be at least 1")
    if value_range is not None and not value_range[0] < value_range[1]:
        raise ValueError(f"value_range={value_range}: the first number must be less than the second")
    own = (root / "train").is_dir()
    held = next((root / part for part in _HELD_OUT if (root / part).is_dir()), None) if own else None
    more = next((root / part for part in _UNLABELED if (root / part).is_dir()), None) if own else None
    unlabeled, more_marks = (None, []) if more is None else _listed(more, held is None)
    train, marks = _listed(root / "train" if own else root, held is None)
    parts = [train]
    if held is not None:
        test, held_marks = _listed(held, False)
        parts.append(test)
        _tell_copies(marks, held_marks, held.name)
        if unlabeled is not None:
            unlabeled = _without_copies(unlabeled, more_marks, held_marks, held.name)
    files = [absolute(part.root, part.names) for part in parts]
    found = look(files[0], channels, value_range)
    labels, classes = labels_of_parts(root, parts)

    def made(paths: Sequence[str], own: Tensor | None) -> ImageFiles:
        return ImageFiles(paths, own, classes, found.reading, found.image_size, root.name, found.statistics)

    sets = [made(paths, own) for paths, own in zip(files, labels, strict=True)]
    rest = None if unlabeled is None else made(absolute(unlabeled.root, unlabeled.names), None)
    if len(sets) == 2:
        sets[0].unlabeled = rest
        if groups is not None:
            _tell_shared_groups(groups, root, parts)
        return sets[0], sets[1]
    whole = sets[0]
    if len(whole) < 10:
        raise DataNotFoundError(
            f"data={str(path)!r}: only {len(whole)} readable images in {root.resolve()}; 10 are the least"
        )
    whole.unlabeled, whole.groups = rest, numbered(marks)
    again = copied(whole.groups)
    if again:
        warnings.warn(f"{again} of {len(whole)} images are exact copies of others; copies stay on one side of the cut.")
    if groups is not None:
        named = numbered(named_groups(groups, train.names))
        whole.groups = joined(whole.groups, named)
        warnings.warn(
            f"The images are of {int(named.max()) + 1} groups (--groups {groups}), each on one side of the cut as a whole."
        )
    if rest is not None:
        group = dict(zip(marks, whole.groups.tolist(), strict=True))
        rest.groups = torch.tensor([group.get(mark, -1) for mark in more_marks], dtype=torch.long)
        shared = int((rest.groups >= 0).sum())
        if shared:
            warnings.warn(
                f"{shared} images without labels are copies of others; those of held-out images are not learnt from."
            )
    return train_test(whole)


def _tell_copies(train: Sequence[str], held: Sequence[str], name: str) -> None:
    """A split that comes with the data is its owner's; how many images stand on both sides is said, where all were read."""
    known = set(train)
    shared = sum(mark in known for mark in held)
    if shared:
        warnings.warn(
            f"{shared} of {len(held)} images of {name} are exact copies of images of train; the split that comes with the "
            "data is left as it is."
        )


def _without_copies(more: Listing, marks: Sequence[str], held: Sequence[str], name: str) -> Listing:
    """Images without labels that are not in the held-out part as well, as far as both were read."""
    known = set(held)
    apart = [place for place, mark in enumerate(marks) if mark not in known]
    if len(apart) == len(marks):
        return more
    warnings.warn(
        f"{len(marks) - len(apart)} images without labels are exact copies of images of {name}, and are left out."
    )
    return more.select(apart)


def _listed(folder: Path, fingerprints: bool) -> tuple[Listing, list[str]]:
    """The images below a folder that are not known to be damaged, and, if asked for, what tells copies."""
    listing = list_images(folder)
    if listing.hidden:
        warnings.warn(f"{folder}: {listing.hidden} images in hidden files and folders are left out.")
    if listing.repeated:
        some = ", ".join(listing.repeated[:5]) + (" ..." if len(listing.repeated) > 5 else "")
        warnings.warn(f"{folder}: links to folders that are here already are left out: {some}")
    if not listing.names:
        raise DataNotFoundError(f"data: no image ({', '.join(SUFFIXES)}) in {folder.resolve()} or below")
    kept = Kept(folder)
    come, gone, different = kept.changes(listing)
    if come or gone or different:
        warnings.warn(
            f"{folder} has changed since it was last opened: {come} images have come, {gone} have gone, {different} differ."
        )
    if not fingerprints and len(listing.names) > READ_UP_TO:
        kept.save(listing)
        return listing, []
    marks = kept.read_all(listing)
    broken = [name for name, mark in zip(listing.names, marks, strict=True) if mark == DAMAGED]
    if broken:
        shown = ", ".join(broken[:10])
        more = f" and {len(broken) - 10} more" if len(broken) > 10 else ""
        warnings.warn(f"{folder}: {len(broken)} of {len(marks)} images cannot be read and are left out: {shown}{more}")
        good = [place for place, mark in enumerate(marks) if mark != DAMAGED]
        listing, marks = listing.select(good), [marks[place] for place in good]
    if not listing.names:
        raise DataNotFoundError(f"data: none of the {len(broken)} images in {folder.resolve()} can be read")
    return listing, marks


def _tell_shared_groups(groups: str, root: Path, parts: Sequence[Listing]) -> None:
    """A split that comes with the data is its owner's; whether groups stand on both sides is said."""
    if groups.isdigit():
        train, test = (set(named_groups(groups, part.names)) for part in parts)
    else:
        names = [[f"{part.root.relative_to(root).as_posix()}/{name}" for name in part.names] for part in parts]
        named = named_groups(groups, [*names[0], *names[1]])
        train, test = set(named[: len(names[0])]), set(named[len(names[0]) :])
    both = sorted(train & test)
    if both:
        warnings.warn(
            f"--groups {groups}: {len(both)} groups have images in both train and {parts[1].root.name}, such as {both[0]}; the "
            "split that comes with the data is left as it is."
        )
