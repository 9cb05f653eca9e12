"""What figures of the report have in common: the picture itself, and curves averaged over seeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..measures import score
from .table import Row, mean


@dataclass(frozen=True)
class Picture:
    """A figure of the report: its file, its title, what to see in it, and a text for those who cannot."""

    path: Path
    title: str
    caption: str
    alt: str


def curve(row: Row, x: str, y: str) -> list[tuple[float, float]]:
    """The mean over seeds of a curve, at the points that all seeds have."""
    curves = [
        [(p[x], score(p, y)) for p in record.get("curve", []) if score(p, y) is not None] for record in row.records
    ]
    curves = [points for points in curves if points]
    if not curves:
        return []
    length = min(map(len, curves))
    return [(mean([c[i][0] for c in curves]), mean([c[i][1] for c in curves])) for i in range(length)]
