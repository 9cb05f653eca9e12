"""Figures of a swept option: accuracy and key drift against its value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import style
from .comparison import summary
from .picture import Picture
from .table import Row, mean


def sweep_figures(table: Sequence[Row], option: str, folder: Path) -> list[Picture]:
    """Accuracy, and where it was measured key drift, against the values of an option."""
    lines = _lines(table, option)
    if not lines:
        return []
    name = option.replace("_", " ")
    found = []
    if any(row.knn for rows in lines.values() for _, row in rows):
        path = _draw(
            lines, name, lambda row: summary(row, "knn_top1").mean, folder / f"sweep-{option}.png", True, _interval
        )
        caption = (
            f"Test kNN accuracy against {name}. Bars are 95 % intervals over the seeds; small marks are single seeds."
        )
        found.append(Picture(path, f"Accuracy against {name}", caption, _said(lines, "knn_top1")))
    if option == "batch_size" and any(row.memory == row.memory for rows in lines.values() for _, row in rows):
        path = _draw(
            lines,
            name,
            lambda row: row.memory if row.memory == row.memory else None,
            folder / "sweep-memory.png",
            False,
        )
        caption = "Peak memory in MiB, of the process, or of the GPU where one is used. All have seen as many images."
        found.append(Picture(path, f"Memory against {name}", caption, f"Peak memory against {name}"))
    if any(_drift(row) is not None for rows in lines.values() for _, row in rows):
        path = _draw(lines, name, _drift, folder / f"sweep-{option}-drift.png", False)
        caption = (
            f"Key drift, averaged over the training, against {name}: one minus the cosine between keys in the queue and "
            "what the key encoder makes of the same images today."
        )
        found.append(Picture(path, f"Key drift against {name}", caption, f"Key drift against {name}"))
    return found


def _lines(table: Sequence[Row], option: str) -> dict[str, list[tuple[Any, Row]]]:
    """Method -> (value, row) in the order of the values."""
    found: dict[str, list[tuple[Any, Row]]] = {}
    for row in table:
        if row.baseline or not row.records:
            continue
        own = {**row.records[0].get("options", {}), **row.records[0].get("recipe", {})}
        if option in own:
            found.setdefault(row.method, []).append((own[option], row))
    for rows in found.values():
        rows.sort(key=lambda item: (isinstance(item[0], str), item[0]))
    return found


def _drift(row: Row) -> float | None:
    """The mean over the training and the seeds."""
    values = [record["metrics"]["key_drift"] for record in row.records if "key_drift" in record.get("metrics", {})]
    return mean(values) if values else None


def _interval(row: Row) -> tuple[float, float]:
    values = summary(row, "knn_top1")
    return values.low, values.high


def _draw(
    lines: Mapping[str, Sequence[tuple[Any, Row]]],
    name: str,
    measure: Callable[[Row], float | None],
    path: Path,
    percent: bool,
    interval: Callable[[Row], tuple[float, float]] | None = None,
) -> Path:
    """Values stand at equal distances: they are often spaced by factors, with zero among them."""
    values = list(dict.fromkeys(value for rows in lines.values() for value, _ in rows))
    values.sort(key=lambda value: (isinstance(value, str), value))
    colours = style.colour_of(list(lines))
    made, axes = style.figure()
    ends = []
    for method, rows in lines.items():
        measured = [(values.index(v), measure(row), row) for v, row in rows]
        points = [(x, y, row) for x, y, row in measured if y is not None]
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-", color=colours[method], ms=7, mew=0)
        for x, _, row in points if interval else ():
            low, high = interval(row)  # type: ignore[misc]
            axes.plot([x, x], [low, high], color=colours[method], lw=1.4, alpha=0.8)
            axes.plot([x] * len(row.knn), row.knn, "o", color=colours[method], ms=3.5, mew=0, alpha=0.4)
        if points:
            ends.append((points[-1][0], points[-1][1], method, colours[method]))
    texts = [f"{value:g}" if isinstance(value, (int, float)) else str(value) for value in values]
    axes.set_xticks(range(len(values)), texts, rotation=60 if sum(map(len, texts)) > 50 else 0)
    axes.margins(x=0.08, y=0.12)
    axes.set_xlabel(name)
    axes.grid(False, axis="x")
    if percent:
        style.percent_axis(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    if len(ends) > 1:
        style.label_ends(axes, ends)
    return style.save(made, path)


def _said(lines: Mapping[str, Sequence[tuple[Any, Row]]], metric: str) -> str:
    return "; ".join(f"{v}: {100 * summary(row, metric).mean:.1f} %" for rows in lines.values() for v, row in rows)
