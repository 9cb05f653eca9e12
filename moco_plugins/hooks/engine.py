"""What a training framework offers to moco-plugins, and what it is asked to do: one job, one outcome."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@dataclass
class TrainingJob:
    """One training run, described without any framework; an engine carries it out.

    ``loader`` is a ``torch.utils.data.DataLoader`` that yields ``(views, labels)``, with views a pair of (N, C, H, W).
    The engine calls ``set_epoch(epoch)`` on the loader's ``batch_sampler`` (or ``sampler``) before each epoch where
    there is one, and sets its ``device`` where it has such an attribute: the views are made there. It steps the scheduler
    once per optimiser step, and leaves all other state to the method itself.
    """

    method: nn.Module
    loader: Iterable[Any]
    epochs: int
    #: Builds the optimiser from the method; called once, after the method is on its device.
    make_optimizer: Callable[[nn.Module], Optimizer]
    #: Builds the schedule from the optimiser and the total number of optimiser steps; None: constant rate.
    make_scheduler: Callable[[Optimizer, int], LRScheduler] | None
    #: Where the engine keeps its checkpoints and logs.
    folder: Path
    #: Continue from the newest checkpoint in ``folder`` where there is one.
    resume: bool = True
    #: Besides the end of each epoch, keep a checkpoint within it whenever so many minutes have passed since the last one;
    #: None: no. Needs a loader whose ``batch_sampler.set_epoch(epoch, first)`` can begin at the batch ``first``.
    checkpoint_minutes: float | None = None
    device: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    precision: str = "32"
    seed: int = 0
    #: Called on rank 0 after each step with (step counted from 1, loss). Where it raises, the job ends on all ranks.
    on_step: Callable[[int, float], None] = lambda step, loss: None
    #: Called on rank 0 after each epoch with the epoch counted from 1; the method is unwrapped and may be evaluated.
    on_epoch: Callable[[int], None] = lambda epoch: None
    #: Called on rank 0 before each checkpoint within an epoch, for whoever has to keep something with it.
    on_checkpoint: Callable[[], None] = lambda: None
    #: Further options of the engine itself, handed through as they are (Trainer arguments, Runner config).
    options: Mapping[str, Any] = field(default_factory=dict)


def begins_anywhere(loader: Any) -> bool:
    """Whether the epochs of a loader can begin at any batch, so that a job can be resumed in their middle."""
    set_epoch = getattr(getattr(loader, "batch_sampler", None), "set_epoch", None)
    return set_epoch is not None and "first" in inspect.signature(set_epoch).parameters


@dataclass
class TrainingOutcome:
    """What an engine reports of a job: optimiser steps made in all, and in this call (less after a resume)."""

    steps: int
    steps_now: int
    log_folder: Path | None = None
    #: Files that only an interrupted job needs again, to resume; whoever has kept the method may remove them.
    checkpoints: Sequence[Path] = ()


@dataclass(frozen=True)
class Adapter:
    """A framework that moco-plugins works in.

    ``activate`` registers our classes with a framework that has a registry, and may be called any number of times.
    ``engine`` trains a :class:`TrainingJob`; ``train_config`` is the command ``moco-plugins train`` (arguments -> exit
    status). Both import the framework when they are called, not before.
    """

    name: str
    framework: str
    #: The command that brings the framework, such as ``pip install "moco-plugins[lightly]"``.
    install: str
    activate: Callable[[], None] = lambda: None
    #: Distributions whose versions a report names.
    distributions: Sequence[str] = ()
    engine: Callable[[TrainingJob], TrainingOutcome] | None = None
    train_config: Callable[[Sequence[str]], int] | None = None
    #: What the framework itself does, for ``moco-plugins speed``: "queue_loss", a function of (size, dim, temperature,
    #: device) that returns a step of (query, key), "ema", one of (query, key, momentum) that returns an update, and "views",
    #: one of (image_size) that returns MoCo v2's transform: image -> two views.
    baselines: Mapping[str, Callable[..., Callable[..., object] | None]] = field(default_factory=dict)
