"""The engine ``accelerate``: carries out a :class:`moco_plugins.hooks.engine.TrainingJob` in a loop of Accelerate's."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, gather_object, send_to_device
from torch import Tensor, nn

from moco_plugins.data.seeding import restore_random_state, saved_random_state, seed_everything
from moco_plugins.files import replacing
from moco_plugins.hooks.engine import TrainingJob, TrainingOutcome, begins_anywhere
from moco_plugins.hooks.method import asked_of
from moco_plugins.steps import distributed
from moco_plugins.steps.processes import join_processes

#: The one checkpoint of a job, replaced after each epoch and, where that is asked for, as minutes pass.
CHECKPOINT = "last.pt"
_PRECISIONS = {"32": "no", "32-true": "no", "bf16": "bf16", "bf16-mixed": "bf16", "16": "fp16", "16-mixed": "fp16"}


def run_job(job: TrainingJob) -> TrainingOutcome:
    """Train ``job.method`` in place; ``job.options`` are arguments of ``accelerate.Accelerator``.

    Under torchrun or ``accelerate launch`` it takes part in what these have started; with ``devices`` > 1 and none of them
    it starts the program once more for each further device.

    Raises:
        ValueError: a device or precision that is not known, or that this machine has not.
    """
    with _state_of_its_own():
        run = _Run(job, _accelerator(job))
        run.train()
    return TrainingOutcome(steps=run.steps, steps_now=run.steps - run.first_step, checkpoints=[run.checkpoint])


@contextlib.contextmanager
def _state_of_its_own() -> Iterator[None]:
    """Accelerate's first Accelerator decides device and precision of a process; here that lasts for the job."""
    states = (AcceleratorState, PartialState, GradientState)
    before = [dict(state._shared_state) for state in states]
    for state in states:
        state._shared_state.clear()
    try:
        yield
    finally:
        for state, content in zip(states, before, strict=True):
            state._shared_state.clear()
            state._shared_state.update(content)


def _accelerator(job: TrainingJob) -> Accelerator:
    kind, _, index = job.device.partition(":")
    several = job.devices > 1 or job.num_nodes > 1
    if kind not in ("auto", "cpu", "cuda", "gpu", "mps"):
        raise ValueError(f"device={job.device!r} must be auto, cpu, cuda, cuda:N or mps")
    if index and several:
        raise ValueError(f"device={job.device!r} names one device and devices={job.devices} asks for several")
    if kind in ("cuda", "gpu") and not torch.cuda.is_available():
        raise ValueError(f"device={job.device!r}: torch finds no CUDA device here; use cpu, or auto")
    on_cpu = kind == "cpu" or (kind == "auto" and not torch.accelerator.is_available())
    precision = _PRECISIONS.get(job.precision)
    if precision is None or (precision == "fp16" and on_cpu):
        place = "cpu" if on_cpu else job.device
        raise ValueError(f"precision={job.precision!r} on {place}: there are 32, bf16-mixed, and on a GPU 16-mixed")
    join_processes(job.devices, job.num_nodes, torch.device("cpu" if on_cpu else "cuda"))
    named = {"ACCELERATE_TORCH_DEVICE": job.device} if index or (kind == "mps" and not several) else {}
    with _environment(named), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*OMP_NUM_THREADS.*")  # it says that it has chosen their number
        return Accelerator(
            **{
                "cpu": on_cpu,
                "mixed_precision": precision,
                "dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True, data_seed=job.seed),
                **job.options,
            }
        )


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


class _JobModel(nn.Module):
    """What is prepared: Accelerate changes the forward of that in mixed precision, and the method's stays as it is."""

    def __init__(self, method: nn.Module) -> None:
        super().__init__()
        self.method = method

    def forward(self, views: Any, labels: Any = None, ids: Any = None) -> Tensor:
        loss: Tensor = self.method(views, **asked_of(self.method, labels, ids))
        return loss


class _Epochs(DataLoaderStateMixin):
    """A loader as it is, batches on the device; tells Accelerate which batch is an epoch's last, so that it steps there.

    ``Accelerator.prepare`` would build a new loader of its parts, which knows nothing of the views that are made on the
    device, and asks for a batch before the last one is used: too early for the random numbers that some loaders draw.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        self.loader, self.device, self.gradient_state = loader, device, GradientState()
        self.epochs = _knows_epochs(loader)
        self.first = 0
        if hasattr(loader, "device"):  # makes the views there
            loader.device = device

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int, first: int = 0) -> None:
        """Choose the epoch's shuffle, and the batch to begin with."""
        self.first = first
        if self.epochs is not None:
            self.epochs.set_epoch(epoch, **({"first": first} if first else {}))

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            for number, batch in enumerate(self.loader, start=self.first + 1):
                self.end_of_dataloader = number >= len(self)
                yield send_to_device(batch, self.device, non_blocking=True)
        finally:
            self.end()


def _knows_epochs(loader: Any) -> Any:
    """What of a loader shuffles by epochs, and gives each process its own part; None: nothing does."""
    parts = (getattr(loader, name, None) for name in ("batch_sampler", "sampler"))
    return next((part for part in parts if hasattr(part, "set_epoch")), None)


class _Run:
    """Optimiser, schedule and counters of a job, its callbacks and its checkpoints."""

    def __init__(self, job: TrainingJob, accelerator: Accelerator) -> None:
        self.job, self.accelerator, self.checkpoint = job, accelerator, job.folder / CHECKPOINT
        resume = job.resume and self.checkpoint.exists()
        if not resume:
            seed_everything(job.seed)
        method: Any = job.method.to(accelerator.device)
        # A loader that gives all processes the same is shared out by Accelerate; else nothing of it may be rebuilt.
        share = accelerator.num_processes > 1 and _knows_epochs(job.loader) is None
        self.loader = accelerator.prepare(job.loader) if share else _Epochs(job.loader, accelerator.device)
        method.total_steps = job.epochs * -(-len(self.loader) // accelerator.gradient_accumulation_steps)
        optimizer = job.make_optimizer(method)
        # The schedule counts real steps, so it is not prepared: Accelerate's makes as many as there are processes.
        self.scheduler = job.make_scheduler(optimizer, method.total_steps) if job.make_scheduler else None
        self.model, self.optimizer = accelerator.prepare(_JobModel(method), optimizer)
        self.method = accelerator.unwrap_model(self.model).method
        self.epoch, self.batch, self.steps = 0, 0, 0  # whole epochs, batches of the next one, optimiser steps
        if resume:
            self._load()
        self.first_step = self.steps
        self.losses: list[Tensor] = []
        self.saved = time.monotonic()

    def train(self) -> None:
        """Carry out what is left of the job."""
        self.method.train()
        while self.epoch < self.job.epochs:
            self.loader.set_epoch(self.epoch, **({"first": self.batch} if self.batch else {}))
            for batch in self.loader:
                self._pass(*batch[:3])
            self._end_epoch()

    def _pass(self, *batch: Any) -> None:
        """One batch, and the step that is due after it, if any."""
        with self.accelerator.accumulate(self.model):
            loss = self.model(*batch)
            self.accelerator.backward(loss)
            self.optimizer.step()
            stepped = self.accelerator.sync_gradients and not self.optimizer.step_was_skipped
            if stepped and self.scheduler is not None:
                self.scheduler.step()
            self.optimizer.zero_grad()
        self.batch += 1
        self.losses.append(loss.detach())
        if not stepped:
            return
        self.steps += 1
        losses, self.losses = self.losses, []
        if distributed.on_first_rank(
            lambda: self._report(sum(map(float, losses)) / len(losses)), self.accelerator.device
        ):
            self._save()

    def _report(self, loss: float) -> bool:
        """Tell of a step; return whether a checkpoint is due."""
        self.job.on_step(self.steps, loss)
        minutes = self.job.checkpoint_minutes
        within = self.batch < len(self.loader) and begins_anywhere(self.job.loader)
        due = within and minutes is not None and time.monotonic() - self.saved >= 60 * minutes
        if due:
            self.job.on_checkpoint()
        return due

    def _end_epoch(self) -> None:
        self.epoch, self.batch = self.epoch + 1, 0
        before = saved_random_state()
        modes = {module: module.training for module in self.method.modules()}
        distributed.on_first_rank(lambda: self.job.on_epoch(self.epoch), self.accelerator.device)
        for module, mode in modes.items():
            module.training = mode
        restore_random_state(before)  # looking at the method must not change its training
        self._save()

    def _parts(self) -> dict[str, Any]:
        """What has a state besides the method."""
        parts = {"optimizer": self.optimizer, "schedule": self.scheduler, "scaler": self.accelerator.scaler}
        return {name: part for name, part in parts.items() if part is not None}

    def _save(self) -> None:
        # All ranks take part: a queue that is shared out is put together, and each has random numbers of its own.
        state = {
            "method": self.method.state_dict(),
            "random_states": gather_object([saved_random_state()]),
            **{name: part.state_dict() for name, part in self._parts().items()},
            **{name: getattr(self, name) for name in ("epoch", "batch", "steps")},
        }

        def write() -> None:
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.checkpoint) as partial:
                torch.save(state, partial)

        distributed.on_first_rank(write, self.accelerator.device)
        self.saved = time.monotonic()

    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        self.method.load_state_dict(state["method"])
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.epoch, self.batch, self.steps = state["epoch"], state["batch"], state["steps"]
        ranks = state["random_states"]
        restore_random_state(ranks[distributed.rank() % len(ranks)])
