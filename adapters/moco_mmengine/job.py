"""The engine of the harness: a :class:`moco_plugins.hooks.engine.TrainingJob` carried out by an MMEngine Runner."""

from __future__ import annotations

import logging
import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.runner import Runner
from torch import nn

from moco_plugins.data.seeding import restore_random_state, saved_random_state
from moco_plugins.files import replacing, write_atomically
from moco_plugins.hooks.engine import TrainingJob, TrainingOutcome, begins_anywhere
from moco_plugins.hooks.method import asked_of
from moco_plugins.steps import distributed
from moco_plugins.steps.processes import join_processes

from .models import MethodModel
from .precision import AutocastOptimWrapper

#: The one checkpoint of a job, and the file that names it, as MMEngine calls it.
CHECKPOINT, NEWEST = "last.pth", "last_checkpoint"


def run_job(job: TrainingJob) -> TrainingOutcome:
    """Train ``job.method`` in place, epoch by epoch, with a checkpoint after each, and within where that is asked for."""
    options = dict(job.options)
    device = _device(job.device)
    several = join_processes(job.devices, job.num_nodes, device)
    if several:
        if not hasattr(getattr(job.loader, "batch_sampler", None), "set_epoch"):
            raise ValueError("loader gives every process all images; its batch_sampler must share them out (set_epoch)")
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"])) if device.type == "cuda" else device
    job.method.to(device)
    optimizer = job.make_optimizer(job.method)
    counts = int(options.pop("accumulative_counts", 1))
    wrapper = _wrapper(job.precision, device, optimizer=optimizer, accumulative_counts=counts)
    hook = _JobHook(job, optimizer, counts)
    runner = _JobRunner(
        **{
            "device": device,
            "model": _JobModel(job.method),
            "work_dir": str(job.folder),
            "train_dataloader": job.loader,
            "train_cfg": {"by_epoch": True, "max_epochs": job.epochs},
            "optim_wrapper": wrapper,
            "default_hooks": {
                "logger": None,
                "sampler_seed": None,
                "checkpoint": None,  # the hook of the job saves, in one step and within epochs, too
            },
            "custom_hooks": [hook],
            "launcher": "pytorch" if several else "none",
            "resume": job.resume and (job.folder / NEWEST).exists(),
            "randomness": {"seed": job.seed},
            # Runners find their logger and message hub by this name.
            "experiment_name": f"{job.folder.name}-{uuid.uuid4().hex[:8]}",
            **options,
        }
    )
    runner.train()
    return TrainingOutcome(
        steps=hook.steps,
        steps_now=hook.steps_now,
        log_folder=Path(runner.log_dir),
        checkpoints=[job.folder / NEWEST, job.folder / CHECKPOINT],
    )


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _wrapper(precision: str, device: torch.device, **options: Any) -> OptimWrapper:
    if precision in ("32", "32-true"):
        return OptimWrapper(**options)
    if precision in ("bf16", "bf16-mixed"):
        return AutocastOptimWrapper(**options)
    if precision in ("16", "16-mixed") and device.type == "cuda":
        return AmpOptimWrapper(dtype="float16", **options)
    raise ValueError(f"precision={precision!r} on {device.type}: there are 32, bf16-mixed, and on a GPU 16-mixed")


class _JobModel(MethodModel):
    """The method as it is: it is initialised, its batches are (views, labels), and the harness asks it for its metrics."""

    def __init__(self, method: nn.Module) -> None:
        super().__init__(method, data_preprocessor={"type": "BaseDataPreprocessor"})

    def init_weights(self) -> None:
        """Leave the weights alone."""

    def forward(  # type: ignore[override]
        self, inputs: Any = None, data_samples: Any = None, ids: Any = None, mode: str = "loss", **unknown: Any
    ) -> Any:
        """Return the loss of the views, with the labels and image numbers that the method asks for."""
        return {"loss": self.method(inputs, **asked_of(self.method, data_samples, ids))}


class _JobRunner(Runner):
    """A Runner that writes to its log file only, and uses the device it is told."""

    def __init__(self, device: torch.device, **options: Any) -> None:
        self.device = device
        super().__init__(**options)

    def build_logger(self, *args: Any, **options: Any) -> Any:
        """Build the logger without its console."""
        logger = super().build_logger(*args, **options)
        for handler in list(logger.handlers):
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                logger.removeHandler(handler)
        return logger

    def wrap_model(self, model_wrapper_cfg: Any, model: nn.Module) -> nn.Module:
        """Put the model on the job's device."""
        model = model.to(self.device)
        if not self.distributed:
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        return MMDistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)


class _JobHook(Hook):
    """Schedule, counters, callbacks and what of them a checkpoint must hold."""

    priority = "VERY_LOW"  # after MMEngine's own, whose counters it saves

    def __init__(self, job: TrainingJob, optimizer: torch.optim.Optimizer, counts: int) -> None:
        self.job, self.steps, self.steps_now, self.reported = job, 0, 0, 0
        self.losses: list[float] = []
        self.batch, self.saved = 0, time.monotonic()  # batches of this epoch that have been trained on
        self.random_state: dict[str, Any] | None = None
        self.device = next(job.method.parameters()).device
        iterations = job.epochs * len(job.loader)  # type: ignore[arg-type]
        total = -(-iterations // counts)
        method: Any = job.method
        method.total_steps = total
        self.scheduler = job.make_scheduler(optimizer, total) if job.make_scheduler else None
        # A step that a loss scaler skips, or that accumulation puts off, does not get here.
        optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        self.steps_now += 1
        if self.scheduler is not None:
            self.scheduler.step()

    def before_train_epoch(self, runner: Any) -> None:
        """Choose the epoch's shuffle, and where it begins."""
        if self.random_state is not None:
            restore_random_state(self.random_state)
            self.random_state = None
        loader = runner.train_dataloader
        if hasattr(loader, "device"):  # makes the views there
            loader.device = self.device
        first = {"first": self.batch} if self.batch else {}
        for sampler in (loader.batch_sampler, loader.sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(runner.epoch, **first)
                return

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Report the step, with the mean loss of the iterations it is made of."""
        self.losses.append(float(outputs["loss"].detach()))
        self.batch += 1
        if self.steps > self.reported:
            self.reported, losses, self.losses = self.steps, self.losses, []
            if distributed.on_first_rank(lambda: self._report(sum(losses) / len(losses)), self.device):
                self._save(runner, whole=False)

    def _report(self, loss: float) -> bool:
        """Tell of a step; return whether a checkpoint is due."""
        self.job.on_step(self.steps, loss)
        loader: Any = self.job.loader
        minutes = self.job.checkpoint_minutes
        within = self.batch < len(loader) and begins_anywhere(loader)
        due = within and minutes is not None and time.monotonic() - self.saved >= 60 * minutes
        if due:
            self.job.on_checkpoint()
        return due

    def _save(self, runner: Any, whole: bool) -> None:
        """Write a checkpoint, at the end of a whole epoch or within one, in place of the last."""
        path = self.job.folder / CHECKPOINT
        if distributed.rank() == 0:
            with replacing(path) as partial:
                runner.save_checkpoint(str(self.job.folder), partial.name, by_epoch=whole)
            write_atomically(self.job.folder / NEWEST, str(path))
        else:
            self.job.method.state_dict()  # takes part, where a queue that is shared out is put together
        self.saved = time.monotonic()

    def after_train_epoch(self, runner: Any) -> None:
        """Report the epoch, and save."""
        self.batch, before = 0, saved_random_state()
        distributed.on_first_rank(lambda: self.job.on_epoch(runner.epoch + 1), self.device)
        restore_random_state(before)  # looking at the method must not change its training
        self._save(runner, whole=True)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Add the schedule and the counter."""
        schedule = self.scheduler.state_dict() if self.scheduler is not None else None
        counters = {"steps": self.steps, "batch": self.batch}
        checkpoint["job"] = {**counters, "schedule": schedule, "random_state": saved_random_state()}

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Take them back."""
        self.steps = self.reported = checkpoint["job"]["steps"]
        self.batch = checkpoint["job"]["batch"]
        self.random_state = checkpoint["job"].get("random_state")
        if self.scheduler is not None:
            self.scheduler.load_state_dict(checkpoint["job"]["schedule"])
