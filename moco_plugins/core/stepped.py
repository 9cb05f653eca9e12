"""What modules with a momentum encoder have in common: the step they are at, by hand or by optimiser, and their state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..steps import follow, stepping
from ..steps.boundary import StepBoundary
from . import diagnostics
from . import temperature as learnable
from .momentum import value_at


class SteppedModule(nn.Module):
    """A :class:`moco_plugins.steps.stepping.Stepped` whose ``settings`` have ``momentum`` and ``temperature``.

    Whatever happens once a step happens when an optimiser that owns parameters of the query encoder has really stepped.
    """

    settings: Any
    total_steps: int | None
    follow_optimizer: bool
    boundary: StepBoundary
    monitor: diagnostics.Monitor
    prepared: bool
    #: Where the temperature is learned.
    log_temperature: nn.Parameter

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Commit the step of an optimiser that owns parameters of the query encoder; called after each step."""
        stepping.after_step(self, optimizer)  # type: ignore[arg-type]
        if hasattr(self, "log_temperature"):
            learnable.after_step(self.log_temperature, optimizer, self.steps)

    def step(self) -> None:
        """Commit by hand: move the key encoder and enqueue the keys of the forward passes since the last step.

        Only needed with ``follow_optimizer=False``; a step that has been committed is not committed again.
        """
        if self.boundary.open:
            stepping.commit(self, None)  # type: ignore[arg-type]

    @property
    def momentum(self) -> float:
        """m in force at this step."""
        return value_at(self.settings.momentum, self.steps, self.total_steps)

    @property
    def temperature(self) -> float | Tensor:
        """T in force at this step; a tensor with gradient where it is learnable."""
        if hasattr(self, "log_temperature"):
            return learnable.value(self.log_temperature)
        return value_at(self.settings.temperature, self.steps, self.total_steps)

    @property
    def steps(self) -> int:
        """Optimiser steps committed so far."""
        return self.boundary.steps

    # State: what a resumed, copied or pickled one needs

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "steps"] = torch.tensor(self.steps)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        steps = state_dict.get(prefix + "steps")
        rest = {name: value for name, value in state_dict.items() if name != prefix + "steps"}
        super()._load_from_state_dict(rest, prefix, *args)
        if steps is None:
            args[2].append(prefix + "steps")  # missing_keys
        else:
            self.boundary.reset(int(steps))
        self.prepared, self.monitor.last = False, None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.follow_optimizer:
            follow.follow_optimizer_steps(self)
