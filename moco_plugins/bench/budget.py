"""How long a run may be: the same number of epochs or images for all, or of encoder passes or seconds for each."""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .cost import PassCounter
from .data import SettingsError
from .loader import StepLoader, key, random_state

KINDS = ("epochs", "images", "passes", "seconds")
_WARM_UP, _TIMED = 3, 20  # steps


@dataclass(frozen=True)
class Budget:
    """An amount of something: ``epochs``, ``images``, encoder ``passes`` (images, forward and backward) or ``seconds``."""

    kind: str
    amount: float

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read "seconds=60".

        Raises:
            SettingsError: an unknown kind, or not a positive number.
        """
        kind, _, amount = text.partition("=")
        try:
            value = float(amount)
        except ValueError:
            value = 0.0
        if kind not in KINDS or not value > 0:
            raise SettingsError(
                f"--budget {text!r}: write one of {', '.join(KINDS)}, = and a positive number: seconds=60"
            )
        return cls(kind, value)

    @property
    def per_method(self) -> bool:
        """Whether methods get different numbers of epochs."""
        return self.kind in ("passes", "seconds")


@dataclass(frozen=True)
class Length:
    """How long a run is: so many epochs of so many steps each."""

    epochs: int
    steps: int


def length_for(
    budget: Budget,
    loader: StepLoader,
    method: nn.Module,
    backbone: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> Length:
    """The length that comes nearest to the budget, at least one step; the method is tried on a copy.

    Epochs may end early, and there may be a few more of them, so that a budget which is no whole number of epochs is met.
    """
    whole = len(loader)
    if budget.kind == "epochs":
        return Length(max(1, round(budget.amount)), whole)
    if budget.kind == "images":
        sampler: Any = loader.batch_sampler
        per_step: float = sampler.batch_size
    else:
        passes, seconds = _try(loader, method, backbone, make_optimizer)
        per_step = passes if budget.kind == "passes" else seconds
    total = max(1, round(budget.amount / per_step))
    fewest = math.ceil(total / whole)
    lengths = [Length(n, max(1, round(total / n))) for n in range(fewest, fewest + max(2, fewest // 4))]
    return min(lengths, key=lambda length: abs(length.epochs * length.steps - total))


def _try(
    loader: StepLoader,
    method: nn.Module,
    backbone: nn.Module,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> tuple[float, float]:
    """Encoder passes and seconds of a step, views included, on a copy of the method."""
    copied: Any = copy.deepcopy(method)
    told = loader.on_batch
    loader.on_batch = getattr(copied, "on_batch", None)
    with random_state(key("try")):
        optimizer = make_optimizer(copied)
        counter = PassCounter(copied, backbone)
        begin = time.perf_counter()
        for number, (views, _) in enumerate(_endless(loader, _WARM_UP + _TIMED)):
            loss = copied(views)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            counter.stop()
            if number == _WARM_UP - 1:
                begin = time.perf_counter()
        seconds = (time.perf_counter() - begin) / _TIMED
    loader.on_batch = told
    return counter.forward + counter.backward, seconds


def _endless(loader: StepLoader, count: int) -> Iterator[Any]:
    return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), count)
