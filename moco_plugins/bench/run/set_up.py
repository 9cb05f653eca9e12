"""Everything that a run is made of, built from its seed: loader, method, backbone, and the job for the engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ...data.images import as_batch
from ...data.loader import StepLoader
from ...data.seeding import key, random_state
from ...hooks import manager as plugins
from ...hooks.engine import TrainingJob, TrainingOutcome
from ..plan.data import Data
from ..plan.runs import RunPlan
from ..plan.settings import Settings
from .optimise import make_optimizer, make_scheduler
from .recipe import Normalise, build_loader, build_seeded_backbone

Engine = Callable[[TrainingJob], TrainingOutcome]


@dataclass(frozen=True)
class SetUp:
    """A run that could start."""

    loader: StepLoader
    method: Any
    backbone: nn.Module
    job: TrainingJob
    engine: Engine


def set_up(run: RunPlan, settings: Settings, data: Data, folder: Path) -> SetUp:
    """Build a run; ``folder`` is the run's own."""
    loader = build_loader(settings, data, run.method, run.seed)
    method, backbone = build_method(run, settings, data, loader)
    engine = plugins.adapter(settings.engine).engine
    assert engine is not None  # checked with the settings
    return SetUp(loader, method, backbone, _job(run, settings, loader, method, folder), engine)


def first_process() -> bool:
    """Whether this is the process that evaluates and writes; before there is a process group the environment tells."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0


def build_method(run: RunPlan, settings: Settings, data: Data, loader: StepLoader) -> tuple[Any, nn.Module]:
    """The method of a run and its backbone, from the run's seed."""
    backbone, width = build_seeded_backbone(settings, data, run.seed)
    with random_state(key(run.seed, "method", run.method)):
        method: Any = plugins.method_factory(run.method)(backbone, width, **run.options)
        if hasattr(method, "set_dataset_size"):
            method.set_dataset_size(len(data.pretrain))
    loader.on_batch = getattr(method, "on_batch", None)
    loader.with_ids = "ids" in getattr(method, "asks_for", ())
    return method, backbone


def show_data(method: Any, data: Data, run: RunPlan) -> None:
    """Show the images to a method that wants to see them before the training, as a memory bank does."""
    if hasattr(method, "see_dataset"):
        finish = Normalise(data.mean, data.std)
        with random_state(key(run.seed, "see")):
            method.see_dataset(lambda rows: finish(as_batch(data.pretrain, rows, data.image_size)[0]))


def _job(run: RunPlan, settings: Settings, loader: StepLoader, method: Any, folder: Path) -> TrainingJob:
    """What the engine is asked to do, without a length and without anybody watching."""
    return TrainingJob(
        method=method,
        loader=loader,
        epochs=settings.epochs or 1,
        make_optimizer=make_optimizer(settings),
        make_scheduler=make_scheduler(settings),
        folder=folder,
        device=settings.device,
        devices=settings.devices,
        num_nodes=settings.num_nodes,
        precision=settings.precision,
        seed=key(run.seed, "engine") % 2**31,
        checkpoint_minutes=settings.checkpoint_minutes,
    )


def run_folder(out: Path, run: RunPlan, settings: Settings) -> Path:
    """Where a run keeps what is its own."""
    return out / "runs" / f"{run.folder}-{settings.engine}"
