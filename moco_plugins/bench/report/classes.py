"""Class by class: which are recognised, and what they are taken for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import style
from .html import section, text
from .picture import Picture
from .table import Row

#: Rows of the table, and classes whose names have room at the picture.
_ROWS, _NAMED = 40, 30


def classes_section(table: Sequence[Row], folder: Path) -> str:
    """The best row's linear probe class by class, with its confusions as a picture; empty where nothing is known."""
    record = next((one for row in table if not row.baseline for one in row.records if one.get("by_class")), None)
    if record is None or len(record["by_class"]) < 2:
        return ""
    who = f"{record['label']}, seed {record['seed']}"
    picture = draw_confusion(record, folder)
    shown = (
        section(f"Class by class: {text(who)}", [picture]) if picture else f"<section><h2>{text(who)}</h2></section>"
    )
    return shown.removesuffix("</section>") + _table(record["by_class"]) + "</section>"


def draw_confusion(record: Mapping[str, Any], folder: Path) -> Picture | None:
    """Draw what each class is taken for by the linear probe, in parts of the class's test images."""
    if not record.get("confusion"):
        return None
    counts = np.array(record["confusion"], dtype=float)
    parts = counts / counts.sum(1, keepdims=True).clip(1)
    names = [row["class"] for row in record["by_class"]]
    side = min(7.0, 2.4 + 0.28 * len(names))
    made, axes = style.figure(width=side + 0.6, height=side)
    axes.imshow(parts, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.grid(False)
    axes.set_xlabel("told by the linear probe")
    axes.set_ylabel("truth")
    places = range(len(names)) if len(names) <= _NAMED else []
    axes.set_xticks(places, [names[place] for place in places], rotation=60, ha="right", fontsize=8)
    axes.set_yticks(places, [names[place] for place in places], fontsize=8)
    if len(names) <= 12:
        for (row, column), part in np.ndenumerate(parts):
            if part >= 0.005:
                colour = "white" if part > 0.5 else "black"
                axes.annotate(f"{100 * part:.0f}", (column, row), ha="center", va="center", fontsize=8, color=colour)
    wrong = parts - np.diag(parts.diagonal())
    row, column = np.unravel_index(wrong.argmax(), wrong.shape)
    caption = "Rows are the truth, in percent of a class's test images."
    if wrong[row, column] > 0:
        caption += f" Most often confused: {names[row]} taken for {names[column]} ({100 * wrong[row, column]:.0f} %)."
    path = style.save(made, folder / "confusion.png")
    return Picture(path, "What is taken for what", caption, "Confusions of the linear probe, class by class")


def _table(classes: Sequence[Mapping[str, Any]]) -> str:
    if "average_precision" in classes[0]:
        return _of_several(classes)
    worst = sorted(classes, key=lambda row: (row["recall"] is None, row["recall"]))[:_ROWS]
    lines = "".join(
        f"<tr><th scope=row>{text(row['class'])}</th><td>{row['images']}</td><td>{_percent(row['recall'])}</td>"
        f"<td>{_percent(row['precision'])}</td></tr>"
        for row in worst
    )
    left = f" The {_ROWS} that are recognised worst, of {len(classes)}." if len(classes) > _ROWS else ""
    return (
        "<div class=scroll tabindex=0><table><thead><tr><th scope=col>class</th><th scope=col>test images</th>"
        f"<th scope=col>recall %</th><th scope=col>precision %</th></tr></thead><tbody>{lines}</tbody></table></div>"
        "<p class=note>Recall: which part of a class's images is recognised; precision: which part of the images that are told "
        f"to be of a class is. By the linear probe; worst first.{left}</p>"
    )


def _of_several(classes: Sequence[Mapping[str, Any]]) -> str:
    worst = sorted(
        (row for row in classes if row["average_precision"] is not None), key=lambda row: row["average_precision"]
    )
    lines = "".join(
        f"<tr><th scope=row>{text(row['class'])}</th><td>{row['images']}</td><td>{_percent(row['average_precision'])}</td></tr>"
        for row in worst[:_ROWS]
    )
    left = f" The {_ROWS} lowest, of {len(worst)} with test images." if len(worst) > _ROWS else ""
    return (
        "<div class=scroll tabindex=0><table><thead><tr><th scope=col>class</th><th scope=col>test images</th>"
        f"<th scope=col>average precision %</th></tr></thead><tbody>{lines}</tbody></table></div>"
        f"<p class=note>Of each class by itself, by the linear probe; lowest first.{left}</p>"
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"
