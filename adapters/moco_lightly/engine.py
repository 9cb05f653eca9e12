"""The engine ``lightning``: carries out a :class:`moco_plugins.hooks.engine.TrainingJob` with Lightning's Trainer."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moco_plugins.data.seeding import restore_random_state, saved_random_state, seed_everything
from moco_plugins.files import replacing
from moco_plugins.hooks.engine import TrainingJob, TrainingOutcome, begins_anywhere
from moco_plugins.hooks.method import asked_of
from moco_plugins.steps import distributed

from .frameworks import lightning

#: The one checkpoint of a job, replaced after each epoch and, where that is asked for, as minutes pass.
CHECKPOINT = "last.ckpt"
_PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}


def train(job: TrainingJob) -> TrainingOutcome:
    """Train ``job.method`` in place.

    One process on one device, or with ``devices`` > 1 Lightning's ``ddp``, which starts the program once more for each
    further device (or takes part in what torchrun has started).

    Raises:
        ValueError: ``job.device`` is not known.
        KeyboardInterrupt: the user interrupted; what is in ``job.folder`` is resumed by the same call.
    """
    pl = lightning()
    checkpoint = job.folder / CHECKPOINT
    resume = job.resume and checkpoint.exists()
    with _quiet():
        trainer = pl.Trainer(**{"plugins": [_plain_writing(pl)], **_trainer_arguments(job)})
        module = _module_class(pl)(job)
        if not resume:
            seed_everything(job.seed)
        loader = module.loader = _loader(job, trainer)
        with _interruptible():
            trainer.fit(module, loader, ckpt_path=str(checkpoint) if resume else None)
    return TrainingOutcome(
        steps=trainer.global_step,
        steps_now=trainer.global_step - module.first_step,
        log_folder=Path(trainer.log_dir) if trainer.logger else None,
        checkpoints=[checkpoint],
    )


def _trainer_arguments(job: TrainingJob) -> dict[str, Any]:
    accelerator, devices = _placement(job)
    several = job.devices > 1 or job.num_nodes > 1
    return {
        "accelerator": accelerator,
        "devices": devices,
        "num_nodes": job.num_nodes,
        "strategy": "ddp" if several else "auto",
        "precision": _PRECISIONS.get(job.precision, job.precision),
        "max_epochs": job.epochs,
        "default_root_dir": str(job.folder),
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": not _shares_itself(job.loader),
        **job.options,
    }


def _plain_writing(pl: Any) -> Any:
    """Lightning writes to /tmp and moves that, which a full disk ends half-way; here whoever saves does it in one step."""

    class PlainWriting(pl.plugins.io.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
            torch.save(checkpoint, path)

    return PlainWriting()


def _placement(job: TrainingJob) -> tuple[str, Any]:
    kind, _, index = job.device.partition(":")
    if kind not in ("auto", "cpu", "cuda", "gpu", "mps"):
        raise ValueError(f"device={job.device!r} must be auto, cpu, cuda, cuda:N or mps")
    if index and job.devices > 1:
        raise ValueError(f"device={job.device!r} names one device and devices={job.devices} asks for several")
    return "gpu" if kind == "cuda" else kind, [int(index)] if index else job.devices


def _shares_itself(loader: Any) -> bool:
    """Whether the loader gives each rank its own part by itself, as the harness's does, and not Lightning for it."""
    return hasattr(getattr(loader, "batch_sampler", None), "set_epoch")


def _loader(job: TrainingJob, trainer: Any) -> Any:
    if trainer.world_size > 1 and not _shares_itself(job.loader):
        return job.loader  # Lightning puts a distributed sampler into it
    return _Epochs(job.loader, trainer)


class _Epochs:
    """A loader that does nothing before its first batch is asked for, and can begin an epoch in its middle.

    Lightning makes the first iterator before it restores the state of the run: too early for the epoch, and for the
    random numbers that some loaders draw.
    """

    def __init__(self, loader: Any, trainer: Any) -> None:
        self.loader, self.trainer = loader, trainer
        self.first = 0  # the batch that the next epoch begins with

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        first, self.first = {"first": self.first} if self.first else {}, 0
        if hasattr(self.loader, "device"):  # makes the views there
            self.loader.device = self.trainer.strategy.root_device
        for name in ("batch_sampler", "sampler"):
            set_epoch = getattr(getattr(self.loader, name, None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.trainer.current_epoch, **first)
                break
        yield from self.loader


def _module_class(pl: Any) -> Any:
    class MethodModule(pl.LightningModule):
        """Any Method as a LightningModule: optimiser and schedule of the job, its callbacks, a checkpoint an epoch."""

        def __init__(self, job: TrainingJob) -> None:
            super().__init__()
            self.job = job
            self.method: Any = job.method
            self.first_step = 0
            self.loader: Any = None
            self._batch, self._saved = 0, time.monotonic()  # batches of this epoch that have been trained on
            self._losses: list[torch.Tensor] = []
            self._random: dict[str, Any] | None = None

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.method(batch[0], **asked_of(self.method, *batch[1:3]))
            self._losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            total = self.trainer.estimated_stepping_batches
            self.method.total_steps = int(total) if total != float("inf") else None
            optimizer = self.job.make_optimizer(self.method)
            if self.job.make_scheduler is None or self.method.total_steps is None:
                return optimizer
            scheduler = self.job.make_scheduler(optimizer, self.method.total_steps)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def on_train_start(self) -> None:
            self._steps_seen = self.trainer.global_step
            self.method.train()
            if self._random is not None:
                restore_random_state(self._random)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step == self._steps_seen:
                return  # gradients accumulate
            self._steps_seen = self.trainer.global_step
            losses, self._losses = self._losses, []
            within = batch_idx + 1 < self.trainer.num_training_batches and begins_anywhere(self.job.loader)
            if distributed.on_first_rank(
                lambda: self._report(sum(map(float, losses)) / len(losses), within), self.device
            ):
                self._batch = batch_idx + 1
                self._save()

        def _report(self, loss: float, within: bool) -> bool:
            """Tell of a step; return whether a checkpoint is due."""
            self.job.on_step(self._steps_seen, loss)
            minutes = self.job.checkpoint_minutes
            due = within and minutes is not None and time.monotonic() - self._saved >= 60 * minutes
            if due:
                self.job.on_checkpoint()
            return due

        def _save(self) -> None:
            path = self.job.folder / CHECKPOINT
            path.parent.mkdir(parents=True, exist_ok=True)
            if distributed.rank() == 0:
                with replacing(path) as partial:
                    self.trainer.save_checkpoint(partial)
            else:  # takes part, and writes nothing
                self.trainer.save_checkpoint(path)
            self._saved = time.monotonic()

        def on_train_epoch_end(self) -> None:
            before = saved_random_state()
            modes = {module: module.training for module in self.method.modules()}
            distributed.on_first_rank(lambda: self.job.on_epoch(self.trainer.current_epoch + 1), self.device)
            for module, mode in modes.items():
                module.training = mode
            restore_random_state(before)  # looking at the method must not change its training
            self._batch = 0
            self._save()

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["random_state"], checkpoint["batch"] = saved_random_state(), self._batch

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self._random, self.first_step = checkpoint["random_state"], checkpoint["global_step"]
            if checkpoint.get("batch"):
                self.loader.first = checkpoint["batch"]

    return MethodModule


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C arrive as KeyboardInterrupt: Lightning turns it into an exit of the program, and SIGINT off."""
    on_main_thread = True
    try:
        handler = signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))
    except ValueError:
        on_main_thread, handler = False, None
    try:
        yield
    except SystemExit as exit_:
        if isinstance(exit_.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    finally:
        if on_main_thread and handler is not None:
            signal.signal(signal.SIGINT, handler)


_LOGGERS = ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric", "lightning")
# Warnings about choices that the job has made, and that its user cannot change.
_WARNINGS = (
    ".*does not have many workers.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*The number of training batches.*is smaller than the logging interval.*",
    ".*srun.*command is available on your system but is not used.*",
    ".*checkpoint that ended before the epoch ended.*",  # the loader goes on where it was
    ".*module\\(s\\) in eval mode at the start of training.*",
    ".*LeafSpec.*is deprecated.*",
)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's banners and tips; errors and real warnings stay."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    with warnings.catch_warnings():
        for message in _WARNINGS:
            warnings.filterwarnings("ignore", message)
        try:
            for name in _LOGGERS:
                logging.getLogger(name).setLevel(logging.WARNING)
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
