"""What a training needs of the Runner besides the model: random numbers that a resume repeats, the number of steps."""

from __future__ import annotations

import functools
import math
from typing import Any

from mmengine.dataset import worker_init_fn
from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from torch import nn

from moco_plugins.core.checks import queue_advice
from moco_plugins.core.sharded_queue import ShardedKeyQueue
from moco_plugins.data.seeding import key, seed_everything

from .checkpoints import check_fits
from .models import MethodModel


class MethodHook(Hook):
    """Make training with ``moco_plugins`` models exactly resumable; ``moco-plugins train`` adds it to every config.

    - Random numbers are seeded anew for each epoch and iteration from the Runner's seed, so that a resumed run draws what
      the whole run would have drawn.
    - The method learns the number of optimiser steps (momentum schedules), under DDP and accumulation too.
    - A queue as large as the data set is told, with a size to try.
    - Resuming from a checkpoint of another model is an error that says what differs.
    - A queue that is shared out among ranks (``gather="sharded"``) is put together by all of them when the first saves.
    - Beside EMAHook, checkpoints keep the queue and the counters of the trained model, which have no average.
    """

    priority = "LOW"  # after EMAHook, before CheckpointHook

    def before_train(self, runner: Any) -> None:
        """Tell the number of steps; seed the batches of an iteration-based loop; let all ranks take part in saving."""
        model = unwrapped(runner.model)
        if get_world_size() > 1 and any(isinstance(part, ShardedKeyQueue) for part in model.modules()):
            runner.save_checkpoint = _SaveOnAllRanks(runner)
        if isinstance(model, MethodModel) and model.method.total_steps is None:
            counts = getattr(runner.optim_wrapper, "_accumulative_counts", 1)
            model.method.total_steps = math.ceil(runner.max_iters / counts)
        queue = getattr(getattr(model, "method", None), "queue", None)
        images: Any = getattr(runner.train_dataloader, "dataset", None)
        advice = queue_advice(getattr(queue, "size", 0), len(images) if hasattr(images, "__len__") else 0)
        if advice:
            runner.logger.warning(advice)
        if getattr(runner.train_dataloader, "persistent_workers", False):
            runner.logger.warning(
                "persistent_workers=True: if this run is interrupted and resumed, its views will not be those of a whole run"
            )
        iterator = getattr(runner.train_loop, "dataloader_iterator", None)
        if iterator is not None:
            runner.train_loop.dataloader_iterator = _SeededBatches(iterator, runner.seed)

    def before_train_epoch(self, runner: Any) -> None:
        """Seed the epoch, in worker processes too: MMEngine would give them the same random numbers every epoch."""
        seed_rank(runner.seed, "epoch", runner.epoch)
        loader = runner.train_dataloader
        if getattr(loader.worker_init_fn, "func", None) in (worker_init_fn, _seed_worker):
            loader.worker_init_fn = functools.partial(_seed_worker, (runner.seed, "epoch", runner.epoch, get_rank()))

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Seed the step of an iteration-based loop; epochs are resumed at their start only."""
        if hasattr(runner.train_loop, "dataloader_iterator"):
            seed_rank(runner.seed, "step", runner.iter)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Refuse to resume from what does not fit."""
        model = unwrapped(runner.model)
        if getattr(runner, "_resume", False) and isinstance(model, MethodModel):
            if not {"meta", "message_hub", "state_dict"} <= checkpoint.keys():
                raise ValueError(
                    f"the checkpoint has {', '.join(checkpoint)}: MMEngine did not save it, and cannot resume from it. Take "
                    "its weights alone with load_from"
                )
            check_fits(model, checkpoint["state_dict"])

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Undo EMAHook's exchange for all that is not a weight."""
        averaged = checkpoint.get("ema_state_dict")
        model = unwrapped(runner.model)
        if averaged is None or not isinstance(model, MethodModel):
            return
        weights = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        for name in checkpoint["state_dict"]:
            if name not in weights:
                checkpoint["state_dict"][name] = averaged[f"module.{name}"]


class _SaveOnAllRanks:
    """The Runner's ``save_checkpoint``, which MMEngine runs on the first rank alone, where the others would be waited for."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.save = runner, runner.save_checkpoint

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.save(*args, **kwargs)
        if get_rank() != 0:
            unwrapped(self.runner.model).state_dict()


def _seed_worker(parts: tuple[Any, ...], worker: int) -> None:
    seed_rank(*parts, worker)


class _SeededBatches:
    """The batches of an iteration-based loop; their random numbers depend on their place alone."""

    def __init__(self, batches: Any, seed: int) -> None:
        self.batches, self.seed, self.place = batches, seed, 0

    def __iter__(self) -> _SeededBatches:
        return self

    def __next__(self) -> Any:
        seed_rank(self.seed, "batch", self.place)
        self.place += 1
        return next(self.batches)


def seed_rank(*parts: object) -> None:
    """Seed random, numpy and torch for this rank, from several things."""
    seed_everything(key(*parts, get_rank()))


def unwrapped(model: nn.Module) -> Any:
    """The model inside DDP and the like."""
    return model.module if is_model_wrapper(model) else model
