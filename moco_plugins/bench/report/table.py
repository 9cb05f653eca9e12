"""The results as rows: one per method (or swept value), over its seeds; printed as text and used by the report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..measures import named, score


@dataclass(frozen=True)
class Row:
    """A method over its seeds. Accuracies are fractions; nan where there is none."""

    label: str
    method: str
    engine: str
    baseline: bool
    seeds: int
    failed: int
    knn: tuple[float, ...]
    linear: tuple[float, ...]
    seconds: float
    images_per_second: float
    images_seen: float
    forward: float
    backward: float
    memory: float
    records: tuple[Mapping[str, Any], ...]

    def values(self, name: str) -> tuple[float, ...]:
        """A measure of each seed that has it."""
        return _values(self.records, name)


def mean(values: Sequence[float]) -> float:
    """The mean, nan of nothing."""
    return statistics.fmean(values) if values else math.nan


def _values(records: Sequence[Mapping[str, Any]], name: str) -> tuple[float, ...]:
    found = (score(record, name) for record in records)
    return tuple(float(value) for value in found if value is not None)


def rows(results: Mapping[str, Any], metric: str = "knn_top1") -> list[Row]:
    """All rows, the best by ``metric`` first, baselines last."""
    groups: dict[tuple[bool, str, str], list[Mapping[str, Any]]] = {}
    for baseline, part in ((False, "runs"), (True, "baselines")):
        for record in results[part]:
            groups.setdefault((baseline, record["label"], record.get("engine", "")), []).append(record)
    made = [_row(records, baseline, label, engine) for (baseline, label, engine), records in groups.items()]

    def place(row: Row) -> tuple[bool, float]:
        value = mean(row.values(metric))
        return row.baseline, math.inf if math.isnan(value) else -value

    return sorted(made, key=place)


def shortened(table: Sequence[Row]) -> list[Row]:
    """The rows of a sweep as "option=value", where all runs are of one method and its name says nothing."""
    if len({row.method for row in table if not row.baseline}) != 1:
        return list(table)
    found = []
    for row in table:
        rest = row.label.removeprefix(f"{row.method} ")
        found.append(replace(row, label=rest) if "=" in rest and not row.baseline else row)
    return found


def each(row: Row) -> list[Row]:
    """A row for each finished run of a row, by seed."""
    return [
        _row([record], row.baseline, row.label, row.engine)
        for record in sorted(row.records, key=lambda record: int(record["seed"]))
    ]


def _row(records: Sequence[Mapping[str, Any]], baseline: bool, label: str, engine: str) -> Row:
    good = [record for record in records if record.get("status", "finished") == "finished"]
    return Row(
        label=label,
        method=records[0]["method"],
        engine=engine,
        baseline=baseline,
        seeds=len(good),
        failed=len(records) - len(good),
        knn=_values(good, "knn_top1"),
        linear=_values(good, "linear_top1"),
        seconds=mean(_values(good, "seconds")),
        images_per_second=mean(_values(good, "images_per_second")),
        images_seen=mean(_values(good, "images_seen")),
        forward=mean(_values(good, "forward_images")),
        backward=mean(_values(good, "backward_images")),
        memory=mean(_values(good, "peak_memory_mib")),
        records=tuple(good),
    )


def percent(values: Sequence[float]) -> str:
    """Accuracies as "95.3", or "95.3 ± 0.2" over several seeds."""
    if not values:
        return "–"
    text = f"{100 * mean(values):.1f}"
    return text if len(values) < 2 else f"{text} ± {100 * statistics.stdev(values):.1f}"


#: Heading of the terminal's table -> what stands there.
TRAINED: dict[str, Callable[[Row], str]] = {
    "method": lambda row: row.label,
    "engine": lambda row: row.engine,
    "seeds": lambda row: f"{row.seeds}" + (f" ({row.failed} failed)" if row.failed else ""),
    "kNN %": lambda row: percent(row.knn),
    "linear %": lambda row: percent(row.linear),
    "train s": lambda row: number(row.seconds),
    "images/s": lambda row: number(row.images_per_second),
    "peak MiB": lambda row: number(row.memory),
}
#: The same where nothing was trained.
JUDGED: dict[str, Callable[[Row], str]] = {
    "weights": lambda row: row.label,
    "backbone": lambda row: str(row.records[0].get("backbone", "")),
    "kNN %": lambda row: percent(row.knn),
    "linear %": lambda row: percent(row.linear),
    "10 % labels": lambda row: percent(row.values("linear_top1_10pct")),
    "1 % labels": lambda row: percent(row.values("linear_top1_1pct")),
    "fine-tuned": lambda row: percent(row.values("finetune_top1")),
}


#: Columns of what is only measured where it is asked for.
_OPTIONAL = ("fine-tuned", "balanced %", "AUROC")


def with_values(cells: Mapping[str, Callable[[Row], str]], table: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """The columns without those that nobody has asked for, named for what was measured."""
    precision = any("knn_map" in record for row in table for record in row.records)
    return {
        named(name, precision): cell
        for name, cell in cells.items()
        if name not in _OPTIONAL or any(cell(row) != "–" for row in table)
    }


def text_table(results: Mapping[str, Any], metric: str = "knn_top1") -> str:
    """The table for the terminal."""
    table = rows(results, metric)
    cells = with_values(JUDGED if results.get("kind") == "evaluate" else TRAINED, table)
    head = tuple(cells)
    lines = [head, *(tuple(cell(row) for cell in cells.values()) for row in table)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    left = {0, 1}

    def show(line: tuple[str, ...]) -> str:
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([show(head), rule, *map(show, lines[1:])])


def number(value: float) -> str:
    """A number for reading: whole, with thin spaces between thousands; a dash for nothing."""
    if math.isnan(value):
        return "–"
    return f"{value:.1f}" if abs(value) < 10 else f"{value:,.0f}".replace(",", " ")
