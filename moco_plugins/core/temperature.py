"""A temperature that is trained: T = exp(log T), bounded below, never decayed."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..steps import distributed
from .lars import LARS

#: The least T that training may reach: CLIP bounds the scale of its logits, 1/T, by 100 (Radford et al. 2021,
#: arXiv:2103.00020, section 2.5).
LEAST = 0.01


def start(temperature: float) -> Tensor:
    """Return log T to start from, 0-dim.

    Raises:
        ValueError: T is below the bound.
    """
    if temperature < LEAST:
        raise ValueError(
            f"temperature={temperature} with learnable_temperature=True: it must be {LEAST} or more, to which training "
            "is bound"
        )
    return torch.tensor(math.log(temperature))


def value(log_temperature: Tensor) -> Tensor:
    """Return T, 0-dim, with gradient; at the bound, too, where ``clamp`` would have none and T would stay for ever."""
    return torch.where(log_temperature < math.log(LEAST), math.log(LEAST), log_temperature).exp()


@torch.no_grad()
def after_step(log_temperature: Tensor, optimizer: Optimizer, steps: int) -> None:
    """Keep T above its bound, from where it can come back; at the first of MoCo's ``steps`` warn where it decays.

    Decay would draw log T to 0, which is T = 1.
    """
    log_temperature.clamp_(min=math.log(LEAST))
    if steps != 1 or isinstance(optimizer, LARS):  # LARS decays what has two dimensions or more
        return
    for group in optimizer.param_groups:
        decay = group.get("weight_decay", 0)
        if decay and any(p is log_temperature for p in group["params"]):
            distributed.warn_once_on_first_rank(
                f"weight_decay={decay} draws the learnable temperature to 1; put moco.log_temperature into a parameter group "
                "of its own with weight_decay=0 (MMEngine: paramwise_cfg=dict(custom_keys={'log_temperature': "
                "dict(decay_mult=0)}))"
            )
