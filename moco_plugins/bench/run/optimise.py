"""Optimisers and schedules of the harness, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from ...core.lars import LARS
from ..plan.settings import Settings

#: Part of the training in which the rate rises (10 of 100 epochs in BYOL's and MoCo v3's shortest), and where steps fall.
WARM_UP, STEPS = 0.1, (0.6, 0.8)


def make_optimizer(settings: Settings) -> Callable[[nn.Module], Optimizer]:
    """AdamW, SGD with momentum 0.9, or LARS; without weight decay on biases and norms."""

    def make(method: nn.Module) -> Optimizer:
        trained = [p for p in method.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups, rate = [group for group in groups if group["params"]], settings.learning_rate or 0.0
        if settings.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=rate, momentum=0.9)
        if settings.optimizer == "lars":
            return LARS(groups, lr=rate)
        return torch.optim.AdamW(groups, lr=rate)

    return make


def make_scheduler(settings: Settings) -> Callable[[Optimizer, int], LRScheduler]:
    """The schedule, a function of (optimiser, steps in all)."""
    if settings.schedule == "one-cycle":
        return one_cycle
    factor = {"cosine": _cosine, "warm-up": _warm_up, "steps": _steps}[settings.schedule]

    def make(optimizer: Optimizer, steps: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: factor(step / max(1, steps), 1 / max(1, steps)))

    return make


def one_cycle(optimizer: Optimizer, steps: int) -> LRScheduler:
    """Up from a 25th of the learning rate for 30 % of the steps, then down to nothing by a cosine."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return OneCycleLR(optimizer, max_lr=rates, total_steps=steps, cycle_momentum=False)


def _cosine(done: float, step: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def _warm_up(done: float, step: float) -> float:
    if done < WARM_UP:
        return (done + step) / (WARM_UP + step)
    return _cosine((done - WARM_UP) / (1 - WARM_UP), step)


def _steps(done: float, step: float) -> float:
    return float(0.1 ** sum(done >= at for at in STEPS))
