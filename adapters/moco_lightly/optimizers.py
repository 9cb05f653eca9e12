"""Optimiser and schedule of :class:`moco_lightly.MoCoModule`: the paper's, and the usual alternatives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from moco_plugins.core.lars import LARS

OPTIMIZERS = ("sgd", "adamw", "lars")
SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True)
class Recipe:
    """How a module is optimised; see :class:`moco_lightly.MoCoModule` for the fields.

    Raises:
        ValueError: an unknown optimiser or schedule, or a number out of range.
    """

    optimizer: str
    lr: float
    scale_lr: bool
    sgd_momentum: float
    weight_decay: float
    decay_all: bool
    schedule: str
    warmup_epochs: float

    def __post_init__(self) -> None:
        for name, value, known in (
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if value not in known:
                raise ValueError(
                    f"{name}={value!r} is not one of {', '.join(known)}; override configure_optimizers for others"
                )
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr} must be greater than 0")
        if self.weight_decay < 0 or self.warmup_epochs < 0:
            raise ValueError(
                f"weight_decay={self.weight_decay} and warmup_epochs={self.warmup_epochs} must not be negative"
            )

    def scaled_lr(self, global_batch: int | None) -> float:
        """The learning rate for a batch of all processes and accumulated batches: linear, from 256.

        Raises:
            ValueError: the batch is not known.
        """
        if not self.scale_lr:
            return self.lr
        if global_batch is None:
            raise ValueError(
                "batch_size=None: the training loader does not say how large its batches are, and lr is scaled by that. "
                "Pass batch_size= (images of a process in one batch), or scale_lr=False"
            )
        return self.lr * global_batch / 256

    def build_optimizer(self, module: nn.Module, global_batch: int | None) -> Optimizer:
        """Build the optimiser of a module's trainable parameters."""
        groups = parameter_groups(module, self.weight_decay, self.decay_all and self.optimizer != "lars")
        lr = self.scaled_lr(global_batch)
        if self.optimizer == "adamw":
            return AdamW(groups, lr=lr)
        if self.optimizer == "lars":
            return LARS(groups, lr=lr, momentum=self.sgd_momentum)
        return SGD(groups, lr=lr, momentum=self.sgd_momentum)

    def build_schedule(self, optimizer: Optimizer, total: int, warmup: int) -> LambdaLR:
        """Build the schedule, stepped once an optimiser step: linear warm-up, then half a cosine to zero, or constant."""

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            if self.schedule == "constant":
                return 1.0
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

        return LambdaLR(optimizer, factor)


def parameter_groups(module: nn.Module, weight_decay: float, decay_all: bool) -> list[dict[str, Any]]:
    """Split the trainable parameters into those that decay and those that do not.

    With ``decay_all`` all weights decay, as in the paper. Otherwise biases and the weights of normalisation layers, which
    are the parameters of fewer than two dimensions, do not. A temperature, of no dimension, never does.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    least = 1 if decay_all else 2
    decaying = [p for p in trainable if p.ndim >= least]
    others = [p for p in trainable if p.ndim < least]
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
