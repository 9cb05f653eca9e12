"""What a folder's images show: the class folder each is in, or a table beside them, in which an image may have several."""

from __future__ import annotations

import csv
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .listing import Listing

#: The table, in the data's folder (with paths from there on), or in that of each part.
TABLE = "labels.csv"
_YES, _NO = ("1", "1.0", "true", "yes"), ("0", "0.0", "false", "no", "")


def labels_of_parts(root: Path, parts: Sequence[Listing]) -> tuple[list[Tensor | None], list[str]]:
    """The labels of each part of a folder, and the names of the classes.

    They are (N,), or (N, classes) of 0 and 1 where a table has images with several classes or none; None without classes.

    Raises:
        ValueError: a table misses images, or cannot be read; see :func:`read_table`.
    """
    tables = [next((file for file in (part.root / TABLE, root / TABLE) if file.is_file()), None) for part in parts]
    if any(table is None for table in tables):
        names = [_folders(part) for part in parts]
        classes = sorted({name for part in names for name in part})
        number = {name: i for i, name in enumerate(classes)}
        return [torch.tensor([number[name] for name in part]) if part else None for part in names], classes
    found: list[list[tuple[str, ...]]] = []
    order: dict[str, None] = {}
    read = {table: read_table(table) for table in dict.fromkeys(tables) if table is not None}
    for table, part in zip(tables, parts, strict=True):
        assert table is not None
        above = "" if table.parent == part.root else f"{part.root.relative_to(root).as_posix()}/"
        beside = [other for other, its in zip(parts, tables, strict=True) if its == table and other is not part]
        columns, rows = read[table]
        order |= dict.fromkeys(columns)
        found.append(_rows_of(table, rows, part.names, above, [name for other in beside for name in other.names]))
    told = {name for part in found for names in part for name in names}
    classes = list(order) or sorted(told)
    if all(len(names) == 1 for part in found for names in part):
        classes = [name for name in classes if name in told]
        number = {name: i for i, name in enumerate(classes)}
        labels: list[Tensor | None] = [torch.tensor([number[names[0]] for names in part]) for part in found]
    else:
        number = {name: i for i, name in enumerate(classes)}
        labels = [_marked(part, number) for part in found]
    if any(_folders(part) for part in parts):
        where = " and ".join(table.relative_to(root).as_posix() for table in read)
        warnings.warn(f"The labels are those of {where}; folders are no classes.")
    return labels, classes


def _marked(part: Sequence[Sequence[str]], number: dict[str, int]) -> Tensor:
    labels = torch.zeros(len(part), len(number), dtype=torch.long)
    for row, names in enumerate(part):
        labels[row, [number[name] for name in names]] = 1
    return labels


def _folders(listing: Listing) -> list[str]:
    """The class folder of each image; none where images lie beside the folders: these are not classes."""
    if any("/" not in name for name in listing.names):
        return []
    return [name.partition("/")[0] for name in listing.names]


def read_table(path: Path) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """The columns that are classes (none where cells name them), and the classes of each image by its name.

    One of two forms, separated by comma, semicolon or tab: a line of headings, then for each image its name and a 0 or 1 for
    each class; or its name and its class, or classes with ``|`` or ``;`` between them.

    Raises:
        ValueError: it cannot be read; names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a table ({error}); save it as CSV in UTF-8") from error
    first = text.partition("\n")[0]
    mark = min(",;\t", key=lambda one: first.find(one) if one in first else len(first) + ",;\t".index(one))
    lines = [[cell.strip() for cell in line] for line in csv.reader(text.splitlines(), delimiter=mark)]
    lines = [line for line in lines if any(line)]
    if not lines or len(lines[0]) < 2:
        raise ValueError(
            f"{path} has no second column; write IMAGE,CLASS or IMAGE and a column of 0 and 1 for each class"
        )
    if len(lines[0]) == 2:  # a line of headings is the row of no image
        return [], {_name(line[0]): _split(line[1]) for line in lines if len(line) > 1}
    classes = lines[0][1:]
    rows = {}
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(lines[0]):
            raise ValueError(f"{path}: line {number} has {len(line)} columns, and the headings {len(lines[0])}")
        odd = [cell for cell in line[1:] if cell.lower() not in (*_YES, *_NO)]
        if odd:
            raise ValueError(
                f"{path}: line {number} says {odd[0]!r} where 0 or 1 is wanted; keep the images' names and one column of "
                "class names (with | between several), or a column of 0 and 1 for each class"
            )
        rows[_name(line[0])] = tuple(name for name, cell in zip(classes, line[1:], strict=True) if cell.lower() in _YES)
    return classes, rows


def _name(cell: str) -> str:
    return cell.replace("\\", "/").removeprefix("./")


def _split(cell: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in cell.replace(";", "|").split("|") if name.strip()))


def _rows_of(
    table: Path, rows: dict[str, tuple[str, ...]], names: Sequence[str], above: str, others: Sequence[str]
) -> list[tuple[str, ...]]:
    """The row of each image: by its path, or, where only one image has it, by its file name; with or without its suffix."""
    bare = Counter(os.path.basename(name) for name in (*names, *others))
    stems = Counter(os.path.splitext(name)[0] for name in bare.elements())
    found, missing = [], []
    for name in names:
        whole, base = above + name, os.path.basename(name)
        keys = [whole, os.path.splitext(whole)[0]]
        keys += [base] * (bare[base] == 1) + [os.path.splitext(base)[0]] * (stems[os.path.splitext(base)[0]] == 1)
        row = next((rows[key] for key in keys if key in rows), None)
        missing += [whole] * (row is None)
        found.append(row or ())
    if missing:
        raise ValueError(
            f"{table} misses {len(missing)} of {len(names)} images, such as {missing[0]}; write a line for each, or move those "
            "without labels to a folder unlabeled beside train"
        )
    return found
