"""The curves of one training: its loss beside guessing, and what the looks at it have found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..measures import score
from . import style
from .health import STALE
from .picture import Picture


def draw_training(record: Mapping[str, Any], folder: Path) -> list[Picture]:
    """All curves of a run that it has points for."""
    curve = record.get("curve") or []
    drawn = [_loss(record, curve, folder / "training-loss.png")]
    for name, file, title, caption, percent in (
        (
            "val_knn_top1", "training-knn.png", "kNN over epochs",
            "Weighted kNN on a part of the training images whose labels were kept back.", True,
        ),
        (
            "metric_contrastive_top1", "training-top1.png", "How often the right key is nearest",
            "Of all keys in the queue, for the images of one batch. It rises as the backbone learns.", True,
        ),
        (
            "metric_key_drift", "training-drift.png", "Key drift",
            f"One minus the cosine between a key in the queue and its image's key today. Over {STALE} keys are stale.", False,
        ),
    ):  # fmt: skip
        points = [(point["epoch"], score(point, name)) for point in curve if score(point, name) is not None]
        if len(points) > 1:
            drawn.append(_line(points, folder / file, title, caption, percent))
    return [picture for picture in drawn if picture is not None]


def _loss(record: Mapping[str, Any], curve: Sequence[Mapping[str, Any]], path: Path) -> Picture | None:
    points = record.get("losses") or []
    if not points:
        return None
    width = max(1, len(points) // 80)  # single batches are noisy
    parts = [points[i : i + width] for i in range(0, len(points), width)]
    xs, ys = [part[-1][0] for part in parts], [sum(loss for _, loss in part) / len(part) for part in parts]
    made, axes = style.figure()
    axes.plot(xs, ys, color=style.COLOURS[0])
    references = [point["metric_loss_reference"] for point in curve if point.get("metric_loss_reference")]
    caption = "Mean over neighbouring steps."
    if references:
        axes.axhline(references[-1], color=style.GREY, lw=1.2, ls=(0, (4, 3)))
        axes.annotate(
            "ln(K + 1): guessing", (0.99, references[-1]), xycoords=("axes fraction", "data"), xytext=(0, 4),
            textcoords="offset points", color=style.GREY, fontsize=9, ha="right",
        )  # fmt: skip
        caption += (
            " It starts low, because random keys are easy to tell apart, rises as real keys fill the queue, then falls."
        )
    axes.set_xlabel("optimiser steps")
    axes.set_xlim(0, max(xs))
    axes.locator_params(axis="x", integer=True)
    axes.margins(y=0.12)
    axes.grid(False, axis="x")
    return Picture(style.save(made, path), "Loss", caption, f"The loss ends at {ys[-1]:.3f}")


def _line(points: Sequence[tuple[float, float]], path: Path, title: str, caption: str, percent: bool) -> Picture:
    made, axes = style.figure()
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, color=style.COLOURS[0], marker="o", ms=4.5, mew=0)
    axes.set_xlabel("epochs")
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", integer=True)
    axes.grid(False, axis="x")
    if percent:
        style.percent_axis(axes.yaxis)
    shown = f"{100 * ys[-1]:.1f} %" if percent else f"{ys[-1]:.3g}"
    return Picture(style.save(made, path), title, caption, f"{title}: {shown} at the end")
