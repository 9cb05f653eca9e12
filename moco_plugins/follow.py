"""The step boundary: know when an optimiser has really stepped, without being told.

torch calls global post hooks after each ``Optimizer.step()``. A step that ``GradScaler`` skips does not get there;
fused optimisers skip inside and say so in ``found_inf``. Gradient accumulation needs no counting: no step, no call.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class StepFollower(Protocol):
    """Something that wants to know of optimiser steps."""

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Handle a step that was taken; look up whether the optimiser owns parameters of interest."""


# One hook for all, for the life of the process: removing a hook while torch walks through its hooks, as a finalizer
# may at any moment, would break that walk. A list, not a set: every rank must serve its followers in the same order.
_followers: list[weakref.ref[Any]] = []
_installed = False


def follow_optimizer_steps(follower: StepFollower) -> None:
    """Call ``follower.after_optimizer_step(optimizer)`` after every successful step of any optimiser.

    Only a weak reference is kept, and following twice is following once.
    """
    global _installed
    if not _installed:
        register_optimizer_step_post_hook(_after_step)
        _installed = True
    _followers[:] = [ref for ref in _followers if ref() is not None]
    if not any(ref() is follower for ref in _followers):
        _followers.append(weakref.ref(follower))


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    found_inf = getattr(optimizer, "found_inf", None)
    if isinstance(found_inf, Tensor) and bool(found_inf.any()):
        return
    for ref in list(_followers):
        follower = ref()
        if follower is not None:
            follower.after_optimizer_step(optimizer)


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """The identities of all parameters an optimiser owns at this moment."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
