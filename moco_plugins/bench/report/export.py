"""The table of results for other people's programs: CSV with every score, Markdown and LaTeX as they are printed."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .comparison import summary
from .table import Row, mean, number, percent, rows

FORMATS = ("csv", "markdown", "latex")
#: Fields of records that are numbers and no scores or costs.
_NO_SCORE = ("seed", "linear_c", "resumed_at_step")
_SHOWN: dict[str, Callable[[Row], str]] = {
    "seeds": lambda row: str(row.seeds) + (f" ({row.failed} failed)" if row.failed else ""),
    "kNN %": lambda row: percent(row.knn),
    "linear %": lambda row: percent(row.linear),
    "10 % labels": lambda row: percent(row.values("linear_top1_10pct")),
    "1 % labels": lambda row: percent(row.values("linear_top1_1pct")),
    "train s": lambda row: number(row.seconds),
    "peak MiB": lambda row: number(row.memory),
}
_ACCURACIES = {"kNN %": "knn_top1", "linear %": "linear_top1", "10 % labels": "linear_top1_10pct",
               "1 % labels": "linear_top1_1pct"}  # fmt: skip


def export(content: Mapping[str, Any], kind: str, metric: str = "knn_top1") -> str:
    """The table of results.

    Args:
        content: as in ``results.json``.
        kind: ``csv``: a line for each row, and for each number of its records mean, standard deviation and the 95 %
            interval of the mean over seeds; accuracies are fractions. ``markdown``, ``latex``: mean ± standard deviation,
            accuracies in percent, the best mean of each column bold; LaTeX needs the package booktabs.
        metric: what to sort by.

    Raises:
        ValueError: an unknown kind.
    """
    made = {"csv": _csv, "markdown": _markdown, "latex": _latex}.get(kind)
    if made is None:
        raise ValueError(f"format={kind!r}: there are {', '.join(FORMATS)}")
    return made(rows(content, metric))


def _csv(table: Sequence[Row]) -> str:
    names: dict[str, None] = {}
    for record in (record for row in table for record in row.records):
        numbers = (n for n, v in record.items() if isinstance(v, (int, float)) and not isinstance(v, bool))
        names.update(dict.fromkeys(name for name in numbers if name not in _NO_SCORE))
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    parts = ("mean", "std", "low", "high")
    heads = (f"{name}_{part}" for name in names for part in parts)
    writer.writerow(["method", "label", "engine", "baseline", "seeds", "failed", *heads])
    for row in table:
        cells: list[Any] = [row.method, row.label, row.engine, int(row.baseline), row.seeds, row.failed]
        for name in names:
            found = summary(row, name)
            values = (found.mean, found.deviation, found.low, found.high)
            cells += ["" if value != value else f"{value:.6g}" for value in values]
        writer.writerow(cells)
    return file.getvalue()


def _lines(table: Sequence[Row], bold: Callable[[str], str]) -> tuple[list[str], list[list[str]]]:
    """Heads and cells, without columns in which nothing stands."""
    engines = len({row.engine for row in table if row.engine}) > 1
    best = {
        head: max((mean(row.values(name)) for row in table if row.values(name)), default=None)
        for head, name in _ACCURACIES.items()
    }
    columns = {head: [cell(row) for row in table] for head, cell in _SHOWN.items()}
    kept = {head: cells for head, cells in columns.items() if any(cell != "–" for cell in cells)}
    for head, cells in kept.items():
        for i, row in enumerate(table):
            if best.get(head) is not None and row.values(_ACCURACIES[head]):
                cells[i] = bold(cells[i]) if mean(row.values(_ACCURACIES[head])) == best[head] else cells[i]
    names = [[row.label, *([row.engine] if engines else [])] for row in table]
    cells_of = [[cells[i] for cells in kept.values()] for i in range(len(table))]
    return ["method", *(["engine"] if engines else []), *kept], [n + c for n, c in zip(names, cells_of, strict=True)]


def _markdown(table: Sequence[Row]) -> str:
    heads, lines = _lines(table, lambda cell: f"**{cell}**")
    texts = len(heads) - len([head for head in heads if head in _SHOWN])
    rule = ["---"] * texts + ["---:"] * (len(heads) - texts)
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in (heads, rule, *lines)
    )


_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--",
            "±": r"$\pm$", **{c: "\\" + c for c in "&%$#_{}"}}  # fmt: skip


def _escaped(value: str) -> str:
    escaped = re.sub("|".join(map(re.escape, _SPECIAL)), lambda found: _SPECIAL[found.group()], value)
    return re.sub(r"(?<=\d)\s(?=\d{3}\b)", r"\\,", escaped)


def _latex(table: Sequence[Row]) -> str:
    mark = "\0"
    heads, lines = _lines(table, lambda cell: f"{mark}{cell}{mark}")
    texts = len(heads) - len([head for head in heads if head in _SHOWN])

    def cell(value: str) -> str:
        inner = _escaped(value.strip(mark))
        return rf"\textbf{{{inner}}}" if value.startswith(mark) else inner

    body = [" & ".join(map(cell, line)) + r" \\" for line in (heads, *lines)]
    first = next((i for i, row in enumerate(table) if row.baseline), len(table)) + 1
    body[1:] = [*body[1:first], *([r"\midrule"] if 1 < first < len(body) else []), *body[first:]]
    columns = "l" * texts + "r" * (len(heads) - texts)
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule",
                      r"\end{tabular}", ""])  # fmt: skip
