"""The comparisons with the reference in numbers, for whoever has to write them down."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .html import text
from .statistics import Difference

_HEADS = ("against {}", "seeds", "points", "95 % interval", "p", "p, Holm", "effect size", "seeds needed")
NOTE = (
    "Paired t tests over seeds; Holm: p corrected for all of these comparisons together. Effect size: mean over deviation of "
    "the differences (Hedges' g for pairs). Seeds needed: with which such a difference, at such a spread, would be found "
    "with 80 % chance at the 5 % level; from few seeds both are rough."
)


def tests_table(differences: Sequence[Difference]) -> str:
    """A table of the differences, folded away; empty where no two seeds could be compared."""
    tests = [one for one in differences if one.count >= 2]
    if not tests:
        return ""
    heads = "".join(f"<th scope=col>{text(head.format(tests[0].reference))}</th>" for head in _HEADS)
    lines = "".join(f"<tr><th scope=row>{text(one.label)}</th>{_cells(one)}</tr>" for one in tests)
    return (
        f"<section class=tests><details><summary>The comparisons in numbers</summary><div class=scroll tabindex=0><table>"
        f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div><p class=note>{text(NOTE)}</p></details></section>"
    )


def _cells(one: Difference) -> str:
    needed = one.seeds_needed
    cells = (
        str(one.count),
        _signed(100 * one.mean),
        f"{_signed(100 * one.low)} to {_signed(100 * one.high)}",
        _small(one.p),
        _small(one.corrected),
        "–" if math.isnan(one.effect) else _signed(one.effect),
        "–" if needed is None else str(needed),
    )
    return "".join(f"<td>{cell}</td>" for cell in cells)


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _small(p: float) -> str:
    return "&lt; 0.001" if p < 0.001 else f"{p:.3f}"
