"""The step boundary: know when an optimiser has really stepped, without being told.

torch calls global post hooks after each ``Optimizer.step()``. A step that ``GradScaler`` skips does not get there;
fused optimisers skip inside and say so in ``found_inf``. Gradient accumulation needs no counting: no step, no call.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .eager import eager


class StepFollower(Protocol):
    """Something that wants to know of optimiser steps."""

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Handle a step that was taken; look up whether the optimiser owns parameters of interest."""


# One hook for all, for the life of the process: removing a hook while torch walks through its hooks, as a finalizer
# may at any moment, would break that walk. A list, not a set: every rank must serve its followers in the same order.
_followers: list[weakref.ref[Any]] = []
_installed = False
_stepped: list[Optimizer] = []  # within a step that is not over yet


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


@eager
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    found_inf = getattr(optimizer, "found_inf", None)
    if isinstance(found_inf, Tensor) and bool(found_inf.any()):
        return
    _stepped.append(optimizer)
    if _within_another_step(optimizer):
        return
    stepped, _stepped[:] = _stepped[:], []
    for taken in stepped:
        for ref in list(_followers):
            follower = ref()
            if follower is not None:
                follower.after_optimizer_step(taken)


def _within_another_step(optimizer: Optimizer) -> bool:
    """Whether this step is a part of another optimiser's, which may go on to change the parameters.

    ``ZeroRedundancyOptimizer`` is one: it lets an inner optimiser step its share, then exchanges the parameters. All
    optimisers' steps run in one and the same function of torch's, which calls the hooks; it is looked for on the stack.
    """
    code = getattr(type(optimizer).step, "__code__", None)
    frame, steps = sys._getframe(1), 0
    while frame is not None and code is not None:
        steps += frame.f_code is code
        frame = frame.f_back  # type: ignore[assignment]
    return steps > 1


def owns(optimizer: Optimizer, leaves: Sequence[Tensor]) -> bool:
    """Whether an optimiser owns one of the leaves of a graph, in whatever form it has them.

    FSDP's first version computes with a flat parameter, which knows the parameters it is made of. Its second version
    (``fully_shard``) computes with gathered copies while the optimiser has the shards, which know the whole's shape: it
    owns them where it has shards for all their shapes.
    """
    owned = parameter_ids(optimizer)
    if any(id(part) in owned for leaf in leaves for part in (leaf, *(getattr(leaf, "_params", None) or ()))):
        return True
    shards = Counter(p.shape for group in optimizer.param_groups for p in group["params"] if hasattr(p, "full_tensor"))
    return bool(shards) and not Counter(leaf.shape for leaf in leaves) - shards


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """The identities of all parameters an optimiser owns at this moment."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
