"""What forward passes leave to be done at the next optimiser step, and which of it is due when a step is taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

#: (name, query parameter, key parameter)
Pair = tuple[str, nn.Parameter, nn.Parameter]

#: Steps of an optimiser without query parameters, before any of one that has them, until it is reported.
FOREIGN_STEPS = 3
#: Steps after which it is known which parameters no optimiser owns.
OWNED_STEPS = 3

_FORWARD, _IN_BACKWARD, _BACKWARD_DONE = range(3)


class _Staged:
    def __init__(self, keys: tuple[Tensor, ...]) -> None:
        self.keys, self.state = keys, _FORWARD


class StepBoundary:
    """Keys staged by forward passes until the optimiser steps, and the parameters that have moved since.

    A step that was skipped (GradScaler found an overflow) leaves no trace but this: the next backward pass finds the
    gradients gone. Keys whose gradient was thrown away are then thrown away too. (With
    ``zero_grad(set_to_none=False)`` that cannot be seen without waiting for the device; they enter with the next step.)
    """

    def __init__(self) -> None:
        self.steps = 0  # a host number, so that schedules need no look at the device
        self._staged: list[_Staged] = []
        self._moved: set[str] = set()
        self._anchor: nn.Parameter | None = None
        #: Sharded parameters never show their gradient, so that nothing can be told from its absence.
        self.sharded = False
        self.passes = 0  # forward passes since the last step, alike on all ranks whatever is let go
        self._foreign_steps = 0
        self._in_use = False  # a forward pass since the last foreign step
        self._owned: set[str] = set()

    @property
    def staged(self) -> bool:
        """Whether keys wait for a step."""
        return bool(self._staged)

    @property
    def open(self) -> bool:
        """Whether an optimiser step now has anything to do."""
        return bool(self._staged or self._moved)

    def stage(self, keys: Iterable[Tensor], loss: Tensor, anchor: nn.Parameter | None, limit: int) -> None:
        """Keep the keys of a forward pass.

        ``anchor`` is a parameter that the loss's gradient reaches. Passes that the ``limit`` newest keys do not need are
        let go: they would be overwritten in any case, and somebody who never steps must not run out of memory.
        """
        if not self._staged:
            self._moved = set()
        # Cloned: a compiled encoder may use the memory again before the step.
        item = _Staged(tuple(key.detach().clone() for key in keys))
        self._staged.append(item)
        self.passes += 1
        self._in_use = True
        while len(self._staged) > 1 and sum(len(kept.keys[0]) for kept in self._staged[1:]) >= limit:
            del self._staged[0]
        loss.register_hook(lambda grad: setattr(item, "state", _IN_BACKWARD))
        if anchor is not None and anchor is not self._anchor:
            self._anchor = anchor
            anchor.register_hook(self._backward_reaches)

    def _backward_reaches(self, grad: Tensor) -> None:
        anchor = self._anchor
        if anchor is not None and anchor.grad is None and not self.sharded:
            # A new accumulation begins: what was accumulated before has come to nothing.
            self._staged = [item for item in self._staged if item.state != _BACKWARD_DONE]
        for item in self._staged:
            if item.state == _IN_BACKWARD:
                item.state = _BACKWARD_DONE

    def take(self) -> list[tuple[Tensor, ...]]:
        """Count a step and hand out the staged keys, a tuple a forward pass; empty if this step was counted before."""
        staged, self._staged = self._staged, []
        self.steps += bool(staged)
        self.passes = self._foreign_steps = 0
        return [item.keys for item in staged]

    def foreign_step(self) -> bool:
        """Count a step, while keys wait, of an optimiser that owns no parameter of interest; True: report it now.

        Only steps after a forward pass of ours count: a model whose loop was interrupted is not to speak while another
        one trains.
        """
        self._foreign_steps += self._in_use
        in_use, self._in_use = self._in_use, False
        return in_use and self.steps == 0 and self._foreign_steps == FOREIGN_STEPS

    def own(self, names: Iterable[str]) -> None:
        """Remember trainable parameters that the optimiser of a step owns; only asked for in the first steps."""
        self._owned.update(names)

    def not_owned(self, names: Iterable[str]) -> list[str]:
        """The names that no optimiser of the first steps owned; told once, at the first pass after them."""
        if self.steps != OWNED_STEPS or self._staged or not self._owned:
            return []
        owned, self._owned = self._owned, set()
        return [name for name in names if name not in owned]

    def due(self, pairs: list[Pair], owned: set[int] | None) -> list[Pair]:
        """The pairs that an optimiser owning ``owned`` (ids; None: all) moves now, each once a step.

        Frozen parameters belong to no optimiser's step; theirs comes with the first.
        """
        due = [
            (name, query, key)
            for name, query, key in pairs
            if (owned is None or id(query) in owned or not query.requires_grad) and name not in self._moved
        ]
        self._moved.update(name for name, _, _ in due)
        return due

    def __getstate__(self) -> dict[str, Any]:
        # What is staged belongs to the original: its gradients do not travel with a copy, nor does the anchor's hook.
        return {**self.__dict__, "_staged": [], "_moved": set(), "_anchor": None, "passes": 0}

    def reset(self, steps: int) -> None:
        """Start over at a step: nothing staged."""
        self.steps, self.passes, self._staged, self._moved = steps, 0, [], set()
