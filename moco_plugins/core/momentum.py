"""The momentum update of the key encoder: k <- m k + (1 - m) q (He et al. 2020, arXiv:1911.05722, equation 2).

``momentum`` always is m, the fraction of the key encoder that is kept: 0.999 in the paper. (MMEngine's averaged models
and BatchNorm use the opposite sign.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

#: A number, or a function of (step, total steps or None) that returns one.
Schedule = float | Callable[[int, int | None], float]


class MomentumRule(Protocol):
    """How key tensors follow query tensors; plugins may bring others (hook ``moco_build_momentum``)."""

    def __call__(self, key: Sequence[Tensor], query: Sequence[Tensor], momentum: float) -> None:
        """Move ``key`` in place."""


@torch.no_grad()
def ema(key: Sequence[Tensor], query: Sequence[Tensor], momentum: float) -> None:
    """Move ``key`` towards ``query`` in place: k <- m k + (1 - m) q. Storage is kept."""
    if key:
        torch._foreach_lerp_(list(key), list(query), 1.0 - momentum)


@dataclass(frozen=True)
class Cosine:
    """A half cosine from ``start`` to ``end`` over the training; ``start`` while the total is unknown.

    MoCo v3 (Chen et al. 2021, arXiv:2104.02057, section 4.1) takes the momentum from 0.99 to 1.
    """

    start: float
    end: float

    def __call__(self, step: int, total: int | None) -> float:
        """Return the value at ``step`` of ``total``."""
        if not total:
            return self.start
        progress = min(max(step / total, 0.0), 1.0)
        return self.end - (self.end - self.start) * (1 + math.cos(math.pi * progress)) / 2


def value_at(schedule: Schedule, step: int, total: int | None) -> float:
    """The value of a number or schedule at a step."""
    return float(schedule(step, total)) if callable(schedule) else float(schedule)


def check_momentum(momentum: Schedule, allow_low: bool) -> None:
    """Refuse a momentum outside [0, 1], and one below 0.5 unless it is wanted: the mark of the opposite sign."""
    value = value_at(momentum, 0, None)
    if not 0 <= value <= 1:
        raise ValueError(f"momentum={momentum!r} is {value} at the start; it must lie in [0, 1] (0.999 in the paper)")
    if value < 0.5 and not allow_low:
        raise ValueError(
            f"momentum={momentum!r}: here momentum is the fraction of the key encoder that is kept at each step (0.999 in "
            f"the paper); MMEngine and mmpretrain count the other way round. If you mean theirs, write "
            f"{round(1 - value, 10)}; if you really want {value}, pass allow_low_momentum=True"
        )
