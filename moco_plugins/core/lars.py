"""LARS, the optimiser of MoCo v3 with ResNet-50. torch has none, and lightly's decays and adapts biases and norms, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017, arXiv:1708.03888), as MoCo v3 uses it.

    For each weight of two or more dimensions the gradient, with weight decay, is scaled to ``trust`` times the norm of the
    weight; biases and the parameters of BatchNorm have neither decay nor scaling. Then momentum, as in SGD.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        momentum: 0.9 as in MoCo v3.
        weight_decay: of weights; 1e-6 in MoCo v3.
        trust: trust coefficient; 0.001.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0, trust: float = 0.001
    ) -> None:
        for name, value in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay), ("trust", trust)):
            if value < 0:
                raise ValueError(f"{name}={value} must not be negative")
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if p.ndim > 1:
                    update = update + group["weight_decay"] * p
                    weight, gradient = p.norm(), update.norm()
                    scale = torch.where((weight > 0) & (gradient > 0), group["trust"] * weight / gradient, 1.0)
                    update = update * scale
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(group["momentum"]).add_(update)
                p.add_(state["momentum"], alpha=-group["lr"])
        return loss
