"""MoCo's loss with its queue, in place of lightly's ``NTXentLoss(memory_bank_size=...)``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from moco_plugins import KeyQueue, distributed, follow, info_nce
from moco_plugins.boundary import StepBoundary
from moco_plugins.eager import eager

from .staging import enqueue, share_queue

_HALF = (torch.float16, torch.bfloat16)


class MoCoLoss(nn.Module):
    """InfoNCE against a queue of keys: ``loss = criterion(query, key)``, as lightly's ``NTXentLoss`` is called.

    The keys of a training step enter the queue when the optimiser that owns the encoder of the query has really stepped,
    once per step and on all ranks alike. So gradient accumulation, steps that a GradScaler skips, a symmetric loss (two
    calls in a step), validation and resuming are right without a flag: in eval mode, under ``no_grad`` and for queries
    without gradient nothing is enqueued, and the queue is part of the ``state_dict()``.

    Args:
        temperature: T; 0.5, the default of ``NTXentLoss``. 0.07 in MoCo v1, 0.2 in v2.
        memory_bank_size: (K, D), number and dimension of the keys; 65536 keys of dimension 128 in the paper.
        gather_distributed: the queue takes the keys of all ranks and is the same on all of them. True, where
            ``NTXentLoss`` has False: with False each rank has a queue of its own, and only rank 0's is in a checkpoint.
        fill: "random" (as lightly's, and the paper's) or "empty", see :class:`moco_plugins.KeyQueue`.
        resize: what loading a queue of another size does: "error", or "keep_newest".

    Attributes:
        queue: :class:`moco_plugins.KeyQueue`.

    Raises:
        ValueError: T <= 0, or a bank size that is not (K, D) with K >= 1.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        memory_bank_size: Sequence[int] = (65536, 128),
        gather_distributed: bool = True,
        *,
        fill: str = "random",
        resize: str = "error",
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be greater than 0 (0.07 in MoCo v1, 0.2 in v2)")
        size, dim = _bank_size(memory_bank_size)
        self.temperature, self.gather_distributed = temperature, gather_distributed
        self.queue = KeyQueue(size, dim, fill=fill, resize=resize)
        self._reset()

    def _reset(self) -> None:
        self.boundary = StepBoundary()
        # The parameters that staged queries were computed from, by identity.
        self._owners: dict[int, weakref.ref[Tensor]] = {}
        self._shared = False
        self._foreign_steps: int | None = 0  # None: not counted any more

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the loss of queries (N, D), which carry the gradient, and their keys (N, D); 0-dim.

        Neither has to be normalised. Keys are detached.

        Raises:
            ValueError: shapes do not match each other or the queue.
        """
        self._check(query, key)
        staging = self.training and torch.is_grad_enabled() and query.requires_grad
        if staging:
            self._share()
        with torch.autocast(query.device.type, enabled=False):
            q, k = (F.normalize(t.float() if t.dtype in _HALF else t, dim=1) for t in (query, key.detach()))
            loss = info_nce(q, k, self.queue.negatives(), self.temperature)
        if staging:
            self._stage(query, k, loss)
        return loss

    def step(self) -> None:
        """Put the staged keys into the queue by hand; only needed where no optimiser of torch makes the steps."""
        self._commit()

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Commit the step of an optimiser that owns a parameter of the query's encoder; called after each step."""
        if not self._owners:
            return
        owned = follow.parameter_ids(optimizer)
        if any(number in owned and ref() is not None for number, ref in self._owners.items()):
            self._commit()
        elif self.boundary.open and self._foreign_steps is not None:
            self._foreign_steps += 1
            if self._foreign_steps == 3:
                distributed.warn_once_on_first_rank(
                    f"{type(optimizer).__name__} has stepped 3 times and owns no parameter that the queries of this "
                    "MoCoLoss were computed from, so its queue does not move. Give the optimiser the encoder's "
                    "parameters, or call criterion.step() after each step"
                )

    def _commit(self) -> None:
        self._foreign_steps = None
        staged = [keys for (keys,) in self.boundary.take()]
        if staged or self.gather_distributed:
            enqueue(self.queue, staged, self.gather_distributed)

    @eager
    def _share(self) -> None:
        if not self._shared and self.gather_distributed:
            share_queue(self.queue)
        self._shared = True

    @eager
    def _stage(self, query: Tensor, keys: Tensor, loss: Tensor) -> None:
        first = next(_leaves(query), None)
        self.boundary.stage([keys], loss, first, limit=self.queue.size)  # type: ignore[arg-type]
        known = self._owners.get(id(first))
        if first is not None and (known is None or known() is not first):
            # The whole graph is walked only when its first leaf is new, which is once in a training.
            alive = {number: ref for number, ref in self._owners.items() if ref() is not None}
            self._owners = {**alive, **{id(leaf): weakref.ref(leaf) for leaf in _leaves(query)}}
        follow.follow_optimizer_steps(self)

    def _check(self, query: Tensor, key: Tensor) -> None:
        for name, tensor in (("query", query), ("key", key)):
            if tensor.ndim != 2 or tensor.shape[1] != self.queue.dim:
                cure = (
                    f"build the loss with memory_bank_size=({self.queue.size}, {tensor.shape[1]})"
                    if tensor.ndim == 2
                    else "flatten it to one row an image"
                )
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; this queue takes (N, {self.queue.dim}): {cure}"
                )
        if query.shape[0] != key.shape[0]:
            raise ValueError(
                f"query has {query.shape[0]} rows and key {key.shape[0]}; row i of both must come from the same image"
            )

    def extra_repr(self) -> str:
        """Show the settings in ``repr``."""
        return f"temperature={self.temperature}, gather_distributed={self.gather_distributed}"

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        # Weak references cannot be pickled, and staged keys belong to the step of the original.
        dropped = ("boundary", "_owners", "_shared", "_foreign_steps")
        return {name: value for name, value in self.__dict__.items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._reset()


def _leaves(tensor: Tensor) -> Iterator[Tensor]:
    """The leaves that a tensor was computed from and that collect a gradient."""
    if tensor.grad_fn is None:
        yield tensor
        return
    todo: list[Any] = [tensor.grad_fn]
    seen = set(todo)
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)  # AccumulateGrad's
        if leaf is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


def _bank_size(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        if size == 0:
            raise ValueError(
                "memory_bank_size=0 means no queue, and MoCo's loss is one with a queue; for negatives of the batch alone "
                "use lightly.loss.NTXentLoss()"
            )
        raise ValueError(
            f"memory_bank_size={size} does not say how wide a key is; write memory_bank_size=({size}, dim)"
        )
    pair = tuple(size)
    if len(pair) != 2 or not all(isinstance(n, int) and n >= 1 for n in pair):
        raise ValueError(f"memory_bank_size={size!r} must be (number of keys, their dimension), both at least 1")
    return pair
