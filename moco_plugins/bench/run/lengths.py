"""How long each run is, so that a budget is met: in images, or in encoder passes or seconds that a trial measures."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ...data.seeding import key, random_state
from ...files import write_atomically
from ...hooks.engine import TrainingJob
from ..plan.budget import Budget
from ..plan.data import Data
from ..plan.errors import SettingsError
from ..plan.runs import RunPlan
from ..plan.settings import Settings
from .cost import PassCounter
from .set_up import Engine, SetUp, run_folder, set_up

#: How long a run is, where a budget has given its length; in its folder.
LENGTH = "length.json"
_WARM_UP, _TIMED = 3, 20  # steps


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
            checkpoint_minutes=None,
        )
        engine(trial)
    seconds = (times[-1] - times[_WARM_UP - 1]) / (len(times) - _WARM_UP)
    return (counter.forward + counter.backward) * processes, seconds


def length_of(settings: Settings, built: SetUp) -> Length:
    """The length of a run; one that a budget gave is kept for a resume, since timing would not give it again."""
    if settings.budget is None:
        return Length(built.job.epochs, len(built.loader))
    path = built.job.folder / LENGTH
    if not path.exists():
        length = length_for(Budget.parse(settings.budget), built.job, built.engine, built.backbone)
        write_atomically(path, json.dumps(asdict(length)))
    return Length(**json.loads(path.read_text(encoding="utf-8")))


def measure_lengths(runs: Sequence[RunPlan], settings: Settings, data: Data, out: Path) -> None:
    """Find the lengths that a budget of passes or seconds gives, before an engine has started further processes.

    Raises:
        SettingsError: a launcher has started several processes, and each would measure another length.
    """
    todo = [(run, run_folder(out, run, settings)) for run in runs]
    todo = [(run, folder) for run, folder in todo if not (folder / LENGTH).exists()]
    if settings.budget is None or not Budget.parse(settings.budget).per_method or not todo:
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingsError(
            f"--budget {settings.budget}: processes that a launcher has started would each measure another length; use "
            "--budget images=N, or let --devices start them"
        )
    for run, folder in todo:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(Exception):  # it will be met again in the run itself, and recorded
            own = run.settings(settings)
            length_of(own, set_up(run, own, data.of_seed(run.seed), folder))
