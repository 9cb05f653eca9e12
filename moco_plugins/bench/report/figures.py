"""The report's figures, drawn from results.json alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import style
from .picture import Picture, curve
from .ranks import draw_ranks
from .sweeps import sweep_figures
from .table import Row, mean, number, rows, shortened

#: Losses that are drawn, each in a panel of its own.
PANELS = 8


def draw_all(results: Mapping[str, Any], folder: Path, metric: str) -> list[Picture]:
    """Draw all figures that the results have data for."""
    option = (results.get("ablation") or {}).get("option")
    table = shortened(rows(results, metric))
    runs = [row for row in table if not row.baseline]
    if len({row.engine for row in runs}) > 1:
        table = [row if row.baseline else replace(row, label=f"{row.label}, {row.engine}") for row in table]
    colours = style.colour_of(sorted({row.label for row in table if not row.baseline}))

    def ranks(table: Sequence[Row], colours: Mapping[str, str], folder: Path) -> Picture | None:
        return draw_ranks(table, metric, colours, folder)

    drawers: list[Callable[..., Picture | None]] = [accuracy, ranks, loss, knn_over_epochs, knn_over_seconds, drift]
    if not option:
        drawers.insert(5, cost)  # the runs of a sweep cost the same
    drawn = (drawer(table, colours, folder) for drawer in drawers)
    return [*(sweep_figures(table, option, folder) if option else []), *(picture for picture in drawn if picture)]


def accuracy(table: Sequence[Row], colours: Mapping[str, str], folder: Path) -> Picture | None:
    """Both accuracies of every row, with each seed, the baselines in grey."""
    shown = [row for row in table if row.knn or row.linear]
    if not shown:
        return None
    made, axes = style.figure(height=max(2.3, (0.5 if len(shown) <= 8 else 0.36) * len(shown) + 1.2))
    for place, row in enumerate(reversed(shown)):
        colour = colours.get(row.label, style.GREY)
        for values, marker, shift in ((row.knn, "o", 0.14), (row.linear, "D", -0.14)):
            if values:
                axes.plot(values, [place + shift] * len(values), marker, color=colour, alpha=0.35, ms=4, mew=0)
                axes.plot([mean(values)], [place + shift], marker, color=colour, ms=8.5, mew=0)
    axes.set_yticks(range(len(shown)), [row.label for row in reversed(shown)])
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.grid(False, axis="y")
    axes.margins(x=0.06)
    style.percent_axis(axes.xaxis)
    handles = [
        axes.plot([], [], m, color=style.INK, ms=7, mew=0, label=n)[0] for m, n in (("o", "kNN"), ("D", "linear probe"))
    ]
    made.legend(handles=handles, loc="outside upper left", ncols=2, frameon=False, fontsize=9.5, handletextpad=0.1)
    path = style.save(made, folder / "accuracy.png")
    caption = (
        "Test accuracy of the frozen backbones after the last epoch. Large marks are means, small ones single seeds."
    )
    return Picture(
        path, "Accuracy", caption, "; ".join(f"{r.label}: kNN {100 * mean(r.knn):.1f} %" for r in shown if r.knn)
    )


def _lines(
    table: Sequence[Row],
    colours: Mapping[str, str],
    path: Path,
    series: Callable[[Row], list[tuple[float, float]]],
    x_label: str,
    percent: bool,
    baselines: bool = False,
) -> Path | None:
    lines = [(row, series(row)) for row in table if not row.baseline]
    lines = [(row, points) for row, points in lines if points]
    if not lines:
        return None
    made, axes = style.figure(height=max(style.HEIGHT, 0.24 * len(lines) + 0.9))
    dashes = style.dashes_of(list(colours))
    ends = []
    for row, points in lines:
        xs, ys = zip(*points, strict=True)
        marker = "o" if len(points) < 15 and len(lines) <= len(style.COLOURS) else None
        axes.plot(xs, ys, color=colours[row.label], ls=dashes[row.label], marker=marker, ms=4.5, mew=0)
        ends.append((xs[-1], ys[-1], row.label, colours[row.label]))
    for row in table if baselines else ():
        if row.baseline and row.knn and row.label == "raw-pixels":
            axes.axhline(mean(row.knn), color=style.GREY, lw=1.2, ls=(0, (4, 3)))
            axes.annotate("raw pixels (test)", (0.01, mean(row.knn)), xycoords=("axes fraction", "data"), xytext=(0, 4),
                          textcoords="offset points", color=style.GREY, fontsize=9)  # fmt: skip
    axes.set_xlabel(x_label)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", integer=True)
    axes.grid(False, axis="x")
    if percent:
        style.percent_axis(axes.yaxis)
    style.label_ends(axes, ends)
    return style.save(made, path)


def _loss_points(row: Row) -> list[tuple[float, float]]:
    curves = [record["losses"] for record in row.records if record.get("losses")]
    if not curves:
        return []
    length = min(map(len, curves))
    points = [(curves[0][i][0], mean([curve[i][1] for curve in curves])) for i in range(length)]
    width = max(1, length // 60)  # smooth: single batches are noisy
    return [
        (points[min(i + width, length) - 1][0], mean([y for _, y in points[i : i + width]]))
        for i in range(0, length, width)
    ]


def loss(table: Sequence[Row], colours: Mapping[str, str], folder: Path) -> Picture | None:
    """The losses, each method in a panel of its own: their scales have nothing to do with each other."""
    lines = [(row, _loss_points(row)) for row in table if not row.baseline]
    lines = [(row, points) for row, points in lines if points]
    if not lines:
        return None
    more, lines = len(lines) - PANELS, lines[:PANELS]
    made, grid = style.figure(height=0.6 + 1.15 * len(lines), rows=len(lines))
    panels = [grid] if len(lines) == 1 else grid
    for axes, (row, points) in zip(panels, lines, strict=True):
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colours[row.label])
        axes.set_title(row.label, loc="left", fontsize=9.5, fontweight="bold", color=colours[row.label], pad=3)
        axes.set_xlim(0, max(xs))
        axes.locator_params(axis="x", integer=True)
        axes.grid(False, axis="x")
        axes.locator_params(axis="y", nbins=3)
        axes.tick_params(labelbottom=axes is panels[-1])
    panels[-1].set_xlabel("optimiser steps")
    path = style.save(made, folder / "loss.png")
    caption = (
        "Training loss, averaged over seeds. The methods' losses are different quantities: compare shapes, not heights."
    )
    if more > 0:
        caption += f" The best {PANELS} are shown, and {more} more are in results.json."
    return Picture(path, "Loss", caption, "Loss curves of " + ", ".join(row.label for row, _ in lines))


def knn_over_epochs(table: Sequence[Row], colours: Mapping[str, str], folder: Path) -> Picture | None:
    """kNN accuracy on the validation part over epochs."""

    def series(row: Row) -> list[tuple[float, float]]:
        return curve(row, "epoch", "val_knn_top1")

    path = _lines(table, colours, folder / "knn_epochs.png", series, "epochs", percent=True)
    caption = "Weighted kNN on the validation part of the training images; test images are used once, at the end."
    return Picture(path, "kNN over epochs", caption, _said(table, series)) if path else None


def knn_over_seconds(table: Sequence[Row], colours: Mapping[str, str], folder: Path) -> Picture | None:
    """The same over training time."""

    def series(row: Row) -> list[tuple[float, float]]:
        return curve(row, "seconds", "val_knn_top1")

    path = _lines(table, colours, folder / "knn_seconds.png", series, "seconds of training", percent=True)
    caption = "The same against training time (evaluation not counted): what a second buys."
    return Picture(path, "kNN over seconds", caption, _said(table, series)) if path else None


def _said(table: Sequence[Row], series: Callable[[Row], list[tuple[float, float]]]) -> str:
    ends = [(row.label, series(row)) for row in table if not row.baseline]
    return "; ".join(f"{label} ends at {100 * points[-1][1]:.1f} %" for label, points in ends if points)


def cost(table: Sequence[Row], colours: Mapping[str, str], folder: Path) -> Picture | None:
    """Test accuracy against training time."""
    shown = [row for row in table if not row.baseline and row.knn and not math.isnan(row.seconds)]
    if len(shown) < 2:
        return None
    made, axes = style.figure(height=max(style.HEIGHT, 0.24 * len(shown) + 0.9))
    ends = [(row.seconds, mean(row.knn), row.label, colours[row.label]) for row in shown]
    for x, y, _, colour in ends:
        axes.plot([x], [y], "o", color=colour, ms=10, mew=0)
    axes.margins(0.1, 0.25)
    axes.set_xlim(left=0)
    style.label_ends(axes, ends, away=10)
    axes.set_xlabel("seconds of training")
    style.percent_axis(axes.yaxis)
    path = style.save(made, folder / "cost.png")
    caption = "Test kNN accuracy against training time; up and to the left is better."
    alt = "; ".join(f"{row.label}: {number(row.seconds)} s for {100 * mean(row.knn):.1f} %" for row in shown)
    return Picture(path, "Accuracy against cost", caption, alt)


def drift(table: Sequence[Row], colours: Mapping[str, str], folder: Path) -> Picture | None:
    """How stale the keys in the queue are, over epochs."""

    def series(row: Row) -> list[tuple[float, float]]:
        return curve(row, "epoch", "metric_key_drift")

    shown = [row for row in table if not row.baseline and series(row)]
    path = _lines(shown, colours, folder / "drift.png", series, "epochs", percent=False)
    caption = (
        "Key drift: one minus the cosine between a key in the queue and what the key encoder makes of the same image "
        "today. The momentum encoder exists to keep this small."
    )
    alt = "Key drift of " + ", ".join(row.label for row in shown)
    return Picture(path, "Key drift", caption, alt) if path else None
