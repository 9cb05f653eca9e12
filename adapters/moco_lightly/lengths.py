"""How long a training is, in steps, and how large its batches are: what schedules and advice rest on."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from moco_plugins.core.checks import queue_advice
from moco_plugins.steps import distributed

from .optimizers import Recipe


def steps(trainer: Any) -> tuple[int | None, int | None]:
    """Return the optimiser steps of the training and of an epoch; None where that is not known.

    Epochs are counted in batches, so that it makes no difference whether the Trainer got ``max_epochs`` or ``max_steps``.
    """
    _load(trainer)
    batches, total = trainer.num_training_batches, trainer.estimated_stepping_batches
    epoch = math.ceil(batches / trainer.accumulate_grad_batches) if 0 < batches < math.inf else None
    return int(total) if 0 < total < math.inf else None, epoch


def schedule(recipe: Recipe, optimizer: Optimizer, total: int | None, epoch: int | None) -> LambdaLR | None:
    """Build the recipe's schedule as far as the lengths are known, and say what is not; None: there is nothing to do."""
    warmup = round(recipe.warmup_epochs * epoch) if epoch else 0
    if recipe.warmup_epochs and not epoch:
        distributed.warn_once_on_first_rank(
            f"warmup_epochs={recipe.warmup_epochs} counts epochs and the training loader has no length: there is no warm-up. "
            "Say how many batches an epoch has with Trainer(limit_train_batches=...)"
        )
    if total is None and recipe.schedule == "cosine":
        distributed.warn_once_on_first_rank(
            "schedule='cosine' needs to know how many steps the training has, and the training loader has no length: the "
            "learning rate stays as it is. Pass Trainer(max_steps=...), or schedule='constant'"
        )
    if total is None and (recipe.schedule == "cosine" or not warmup):
        return None
    return recipe.build_schedule(optimizer, total or 0, warmup)


def global_batch(trainer: Any, batch_size: int | None) -> int | None:
    """Return the images of an optimiser step, of all processes; None where the loader does not say."""
    _load(trainer)
    loader = trainer.train_dataloader
    size = batch_size or getattr(loader, "batch_size", None)
    size = size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size * trainer.world_size * trainer.accumulate_grad_batches if size else None


def tell(module: Any) -> None:
    """Tell a module's MoCo how long the training is; warn of schedules that stand still, and of a queue that is too large."""
    moco, trainer = module.moco, module.trainer
    total, _ = steps(trainer)
    if total is not None:
        moco.total_steps = total
    scheduled = [name for name in ("momentum", "temperature") if callable(getattr(moco.settings, name))]
    if moco.total_steps is None and scheduled:
        distributed.warn_once_on_first_rank(
            f"the schedule of {' and '.join(scheduled)} needs to know how many steps the training has, and the training "
            "loader has no length: it stands still. Pass Trainer(max_steps=...), or total_steps= to MoCo"
        )
    advice = queue_advice(moco.settings.queue_size, _images(trainer))
    if advice:
        distributed.warn_once_on_first_rank(advice)


def explain(error: ValueError, images: int, batch_idx: int) -> None:
    """Where BatchNorm got a single image in training, raise an error that says which batch and what to do."""
    if images == 1 and "more than 1 value per channel" in str(error):
        raise ValueError(
            f"batch {batch_idx} of the epoch has a single image, and BatchNorm in training needs two or more; give the "
            "training DataLoader drop_last=True"
        ) from error


def _load(trainer: Any) -> None:
    """Lightning makes the loaders late where ``max_epochs`` is not needed for the length of the training."""
    if trainer.train_dataloader is None:
        trainer.fit_loop.setup_data()


def _images(trainer: Any) -> int:
    """Images of the training data; 0 where that is not known."""
    loaders = trainer.train_dataloader
    parts = (
        loaders.values() if isinstance(loaders, dict) else loaders if isinstance(loaders, (list, tuple)) else [loaders]
    )
    try:
        return sum(len(part.dataset) for part in parts)
    except (AttributeError, TypeError):
        return 0
