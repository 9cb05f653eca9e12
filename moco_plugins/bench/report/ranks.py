"""Many methods at once: mean ranks over seeds, Friedman's test, and the critical difference of Nemenyi's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from . import style
from .comparison import by_seed, join
from .picture import Picture
from .statistics import CONFIDENCE
from .table import Row

#: What the test needs: with fewer, its distribution is not the one that is asked.
LEAST_METHODS, LEAST_SEEDS = 4, 5


@dataclass(frozen=True)
class Ranking:
    """Mean ranks of methods over seeds, the best (lowest) first.

    ``p`` is that of Friedman's test that all are alike; two ranks further apart than ``critical`` differ.
    """

    ranks: Mapping[str, float]
    seeds: int
    p: float
    critical: float
    left_out: tuple[str, ...] = ()

    def groups(self) -> list[list[str]]:
        """The largest groups of neighbours that cannot be told apart; none is a part of another."""
        names = list(self.ranks)
        found: list[list[str]] = []
        for i, first in enumerate(names):
            group = [name for name in names[i:] if self.ranks[name] - self.ranks[first] <= self.critical]
            if len(group) > 1 and not (found and set(group) <= set(found[-1])):
                found.append(group)
        return found


def rank(table: Sequence[Row], metric: str) -> Ranking | None:
    """Rank the methods of one engine that have all seeds (Demšar 2006, JMLR 7); None where there are too few.

    Seeds take the place of data sets: what is told apart is told apart on this data.
    """
    from scipy.stats import friedmanchisquare, rankdata, studentized_range

    runs = [row for row in table if not row.baseline and by_seed(row, metric)]
    if len(runs) < LEAST_METHODS or len({row.engine for row in runs}) > 1:
        return None
    seeds = sorted({seed for row in runs for seed in by_seed(row, metric)})
    whole = [row for row in runs if len(by_seed(row, metric)) == len(seeds)]
    left_out = tuple(row.label for row in runs if row not in whole)
    if len(seeds) < LEAST_SEEDS or len(whole) < LEAST_METHODS:
        return None
    runs, values = whole, [by_seed(row, metric) for row in whole]
    scores = np.array([[one[seed] for one in values] for seed in seeds])  # seeds x methods
    if all(float(np.ptp(row)) == 0 for row in scores):
        return None
    ranks = rankdata(-scores, axis=1).mean(0)
    count = len(runs)
    quantile = float(studentized_range.ppf(CONFIDENCE, count, np.inf)) / math.sqrt(2)
    critical = quantile * math.sqrt(count * (count + 1) / (6 * len(seeds)))
    order = sorted(range(count), key=lambda i: ranks[i])
    p = float(friedmanchisquare(*scores.T).pvalue)
    return Ranking({runs[i].label: float(ranks[i]) for i in order}, len(seeds), p, critical, left_out)


def draw_ranks(table: Sequence[Row], metric: str, colours: Mapping[str, str], folder: Path) -> Picture | None:
    """The critical-difference diagram; None where there are too few methods or seeds.

    One line a method, its rank as a mark, and bars over those that cannot be told apart: it stays readable on a phone.
    """
    found = rank(table, metric)
    if found is None:
        return None
    names = list(found.ranks)
    made, axes = style.figure(height=1.2 + 0.27 * len(names))
    for place, name in enumerate(names):
        colour = colours.get(name, style.INK)
        axes.plot([found.ranks[name]], [place], "o", color=colour, ms=8, mew=0)
    for number, group in enumerate(found.groups()):
        at = len(names) + 0.6 * number  # below the last one
        axes.plot([found.ranks[group[0]], found.ranks[group[-1]]], [at, at], color=style.GREY, lw=3.5)
    low = len(names) + 0.6 * len(found.groups())
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(low, -0.7)
    axes.set_xlim(0.5, len(names) + 0.5)
    axes.grid(False, axis="y")
    axes.set_xlabel(f"mean rank over {found.seeds} seeds (critical difference {found.critical:.2f})")
    path = style.save(made, folder / "ranks.png")
    p = "p < 0.001" if found.p < 0.001 else f"p = {found.p:.2g}"
    caption = (
        f"Ranks of the methods, 1 the best, averaged over seeds. Methods under one grey bar are not told apart (Nemenyi's "
        f"test at 5 %, which asks for much with so many methods). Friedman's test that all are alike: {p}."
    )
    if found.left_out:
        caption += f" Left out, for want of a seed: {join(found.left_out)}."
    return Picture(path, "Ranks", caption, "; ".join(f"{name}: {value:.2f}" for name, value in found.ranks.items()))
