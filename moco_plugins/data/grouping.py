"""Images that belong together, and so to one side of a cut: copies of one another, and groups that the user names."""

from __future__ import annotations

import csv
import hashlib
import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def numbered(names: Iterable[Hashable]) -> Tensor:
    """A number for each different name, from 0, in the order in which they come: (N,)."""
    found: dict[Hashable, int] = {}
    return torch.tensor([found.setdefault(name, len(found)) for name in names], dtype=torch.long)


def joined(first: Tensor, second: Tensor) -> Tensor:
    """The smallest groups (N,) in which what is together in ``first`` or in ``second`` is together."""
    parent = list(range(int(first.max()) + 1)) if len(first) else []

    def top(group: int) -> int:
        while parent[group] != group:
            parent[group] = group = parent[parent[group]]
        return group

    seen: dict[int, int] = {}
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        parent[top(one)] = top(seen.setdefault(other, one))
    return numbered(top(group) for group in first.tolist())


def copies(images: Tensor) -> Tensor:
    """Groups (N,) of equal images of an array (N, C, H, W)."""
    return numbered(hashlib.blake2b(image.numpy().tobytes(), digest_size=16).digest() for image in images)


def copied(groups: Tensor) -> int:
    """How many images are copies of others that come before them."""
    return len(groups) - len(torch.unique(groups))


def named_groups(given: str, names: Sequence[str]) -> list[str]:
    """The group of each image file, by ``--groups``.

    Args:
        given: a number, of the folder below the data's root that names the group (1 is the highest); or a table of image
            and group, separated by comma, semicolon or tab, with or without a line of headings.
        names: the files, from the root on.

    Raises:
        ValueError, OSError: it cannot be read, or misses images.
    """
    if given.isdigit():
        return _by_depth(int(given), names)
    path = Path(given).expanduser()
    if not path.is_file():
        raise ValueError(
            f"--groups {given}: there is no such file; give one, or the depth of the folder that is the group"
        )
    text = path.read_text(encoding="utf-8-sig")
    mark = max(",;\t", key=text.partition("\n")[0].count)
    table = {row[0].strip().replace("\\", "/").removeprefix("./"): row[1].strip() for row in _rows(text, mark)}
    missing = [name for name in names if name not in table]
    if missing:
        raise ValueError(
            f"--groups {given}: it misses {len(missing)} of {len(names)} images, such as {missing[0]}; write a line "
            "IMAGE,GROUP for each, with paths from the data's folder on"
        )
    return [table[name] for name in names]


def _rows(text: str, mark: str) -> Iterable[list[str]]:
    return (row for row in csv.reader(text.splitlines(), delimiter=mark) if len(row) >= 2)


def _by_depth(depth: int, names: Sequence[str]) -> list[str]:
    parts = [name.split("/")[:-1] for name in names]
    shallow = [name for name, folders in zip(names, parts, strict=True) if not 1 <= depth <= len(folders)]
    if shallow:
        raise ValueError(
            f"--groups {depth}: {len(shallow)} of {len(names)} images are in no folder of that depth, such as {shallow[0]}; "
            "1 is the folder below the data's own"
        )
    return [folders[depth - 1] for folders in parts]


def grouped_split(labels: Tensor | None, groups: Tensor, held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split into (kept, held out) row numbers, whole groups, near the same fraction of each class; fixed by ``seed``.

    A group is held out where its classes, by its images of each, still need some.

    Raises:
        ValueError: there is one group only.
    """
    kinds = labels if labels is not None and labels.ndim == 1 else torch.zeros(len(groups), dtype=torch.long)
    groups = torch.unique(groups, return_inverse=True)[1]
    order = groups.argsort(stable=True)
    members = order.split(torch.bincount(groups).tolist())
    if len(members) < 2:
        raise ValueError("groups: all images are of one group, so that nothing can be held out; give smaller groups")
    wanted: dict[int, float] = {
        int(kind): held_out * int(count) for kind, count in zip(*torch.unique(kinds, return_counts=True), strict=True)
    }
    have: Counter[int] = Counter()
    of_kind: dict[int, list[int]] = {}
    held: set[int] = set()
    generator = torch.Generator().manual_seed(seed)
    for number in torch.randperm(len(members), generator=generator).tolist():
        own = Counter(kinds[members[number]].tolist())
        for kind in own:
            of_kind.setdefault(kind, []).append(number)
        if sum(count * (have[kind] + count / 2 - wanted[kind]) for kind, count in own.items()) <= 0:
            held.add(number)
            have += own
    for numbers in of_kind.values():  # one of each class at least on either side, where there are two
        if len(numbers) > 1 and not held.intersection(numbers):
            held.add(min(numbers, key=lambda number: len(members[number])))
    if not held:
        held.add(min(range(len(members)), key=lambda number: len(members[number])))
    chosen = sorted(held)
    kept = [number for number in range(len(members)) if number not in held]
    return _rows_of(members, kept), _rows_of(members, chosen)


def _rows_of(members: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    rows: list[Any] = list(itertools.chain.from_iterable(members[number].tolist() for number in numbers))
    return torch.tensor(rows, dtype=torch.long).sort().values
