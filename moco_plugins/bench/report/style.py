"""How figures look: colours that colour-blind readers can tell apart, few lines, labels beside what they name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

#: Okabe and Ito's colours, in the order in which they are easiest to tell apart on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#B8860B", "#56B4E9", "#555555", "#882255")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "h")
#: Where there are more lines than colours.
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1, 1.4)), (0, (6, 1.5, 1, 1.5)))
GREY, INK, RULE = "#8a8f98", "#1f2328", "#e3e6ea"
#: Inches. 4.8 at 11 points stays readable when it is scaled to a phone's width.
WIDTH, HEIGHT, DPI = 4.8, 3.3, 200

_RC = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Inter", "Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans"],
    "font.size": 10.5,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "moco-plugins",  # the same figure is the same file
}


def colour_of(labels: Sequence[str]) -> dict[str, str]:
    """A colour for each label, the same in all figures."""
    return {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(labels)}


def dashes_of(labels: Sequence[str]) -> dict[str, Any]:
    """A line style for each label: another one each time the colours begin again."""
    return {label: DASHES[i // len(COLOURS) % len(DASHES)] for i, label in enumerate(labels)}


def figure(width: float = WIDTH, height: float = HEIGHT, rows: int = 1) -> tuple[Any, Any]:
    """A matplotlib figure and its axes (a list of them with several rows), without pyplot's global state."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_known(_RC)):
        made = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(made)
        axes = made.subplots(rows, 1, squeeze=False)[:, 0]
        return made, axes[0] if rows == 1 else list(axes)


def _known(settings: dict[str, Any]) -> Any:
    """Only fonts that are there: matplotlib warns of each one that is missing."""
    from matplotlib import font_manager

    have = {font.name for font in font_manager.fontManager.ttflist}
    return {**settings, "font.sans-serif": [f for f in settings["font.sans-serif"] if f in have] or ["DejaVu Sans"]}


def save(made: Any, path: Path) -> Path:
    """Write a PNG, and an SVG of the same name beside it for whoever wants to print or edit it."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(_known(_RC)):
        made.savefig(path, facecolor="white")
        made.savefig(path.with_suffix(".svg"), facecolor="white", metadata={"Date": None})
    return path


def label_ends(axes: Any, ends: Iterable[tuple[float, float, str, str]], away: float = 6) -> None:
    """Write labels right of where lines end, (x, y, text, colour), pushed apart so that none covers another.

    ``away`` is the distance in points.
    """
    ends = sorted(ends, key=lambda end: end[1])
    if not ends:
        return
    low, high = axes.get_ylim()
    gap = (high - low) * min(0.075, 1 / len(ends))
    places: list[float] = []
    for _, y, _, _ in ends:
        places.append(max(y, places[-1] + gap) if places else y)
    overflow = places[-1] - high
    if overflow > 0:  # too high: push the topmost ones down again, from above
        places[-1] = high
        for i in range(len(places) - 2, -1, -1):
            places[i] = min(places[i], places[i + 1] - gap)
    for (x, _, text, colour), y in zip(ends, places, strict=True):
        axes.annotate(
            text,
            (x, y),
            xytext=(away, 0),
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=9.5 if len(ends) <= 12 else 8,
            fontweight="bold",
            annotation_clip=False,
        )


def percent_axis(axis: Any) -> None:
    """Show fractions as percent."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
