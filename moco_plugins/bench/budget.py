"""How long a run may be: the same number of epochs or images for all, or of encoder passes or seconds for each."""

from __future__ import annotations

import copy
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..engine import TrainingJob, TrainingOutcome
from .cost import PassCounter
from .data import SettingsError
from .loader import key, random_state

Engine = Callable[[TrainingJob], TrainingOutcome]

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


def length_for(budget: Budget, job: TrainingJob, engine: Engine, backbone: nn.Module) -> Length:
    """The length that comes nearest to the budget, at least one step.

    Epochs may end early, and there may be a few more of them, so that a budget which is no whole number of epochs is met.

    Args:
        budget: the budget.
        job: the run, of which a copy is tried where the budget is passes or seconds.
        engine: carries out the trial.
        backbone: the backbone of the job's method.
    """
    loader: Any = job.loader
    whole = len(loader)
    if budget.kind == "epochs":
        return Length(max(1, round(budget.amount)), whole)
    if budget.kind == "images":
        per_step: float = loader.batch_sampler.batch_size
    else:
        passes, seconds = _try(job, engine, backbone)
        per_step = passes if budget.kind == "passes" else seconds
    total = max(1, round(budget.amount / per_step))
    fewest = math.ceil(total / whole)
    lengths = [Length(n, max(1, round(total / n))) for n in range(fewest, fewest + max(4, fewest // 2))]
    return min(lengths, key=lambda length: abs(length.epochs * length.steps - total))


def _try(job: TrainingJob, engine: Engine, backbone: nn.Module) -> tuple[float, float]:
    """Encoder passes and seconds of a step, from a few steps of a copy: one process, with its share of the batch."""
    method: Any = copy.deepcopy(job.method)
    processes = job.devices * job.num_nodes
    loader = job.loader.of_one_process(processes, _WARM_UP + _TIMED)  # type: ignore[attr-defined]
    loader.on_batch = getattr(method, "on_batch", None)
    counter = PassCounter(method, backbone)
    times: list[float] = []

    def on_step(step: int, loss: float) -> None:
        counter.stop()
        times.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder, random_state(key("try")):
        trial = replace(
            job,
            method=method,
            loader=loader,
            epochs=math.ceil((_WARM_UP + _TIMED) / len(loader)),
            folder=Path(folder),
            devices=1,
            num_nodes=1,
            on_step=on_step,
            on_epoch=lambda epoch: None,
        )
        engine(trial)
    seconds = (times[-1] - times[_WARM_UP - 1]) / (len(times) - _WARM_UP)
    return (counter.forward + counter.backward) * processes, seconds
