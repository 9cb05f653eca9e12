"""MoCo's loss with its queue, for people who have encoders and a momentum update of their own."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..steps import distributed, follow
from ..steps.boundary import FOREIGN_STEPS, StepBoundary
from ..steps.eager import eager
from ..steps.shared_queue import enqueue, share_queue
from .infonce import info_nce
from .key_queue import KeyQueue
from .normalise import unit_rows


class QueueLoss(nn.Module):
    """InfoNCE against a queue of keys: ``loss = criterion(query, key)``.

    The keys of a training step enter the queue when the optimiser that owns the encoder of the query has really stepped,
    once per step and on all ranks alike. So gradient accumulation, steps that a GradScaler skips, a symmetric loss (two
    calls in a step), validation and resuming are right without a flag: in eval mode, under ``no_grad`` and for queries
    without gradient nothing is enqueued, and the queue is part of the ``state_dict()``.

    Args:
        queue_size: K, number of keys.
        dim: D, their dimension.
        temperature: T; 0.07 in MoCo v1, 0.2 in v2.
        in_batch_negatives: the other keys of the batch are negatives too.
        gather_distributed: the queue takes the keys of all ranks and is the same on all of them. False: each rank has a
            queue of its own, and only rank 0's is in a checkpoint.
        fill, resize: see :class:`moco_plugins.KeyQueue`.

    Attributes:
        queue: :class:`moco_plugins.KeyQueue`.

    Raises:
        ValueError: T <= 0, K < 1 or D < 1.
    """

    def __init__(
        self,
        queue_size: int = 65536,
        dim: int = 128,
        temperature: float = 0.2,
        in_batch_negatives: bool = False,
        gather_distributed: bool = True,
        *,
        fill: str = "random",
        resize: str = "error",
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be greater than 0 (0.07 in MoCo v1, 0.2 in v2)")
        self.temperature, self.in_batch_negatives = temperature, in_batch_negatives
        self.gather_distributed = gather_distributed
        self.queue = KeyQueue(queue_size, dim, fill=fill, resize=resize)
        self._reset()

    def _reset(self) -> None:
        self.boundary = StepBoundary()
        # The parameters that staged queries were computed from, by identity.
        self._owners: dict[int, weakref.ref[Tensor]] = {}
        self._shared = False

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
        q, k = unit_rows(query), unit_rows(key.detach())  # N x D
        loss = info_nce(q, k, self.queue.negatives(), self.temperature, self.in_batch_negatives)
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
        leaves = [leaf for ref in self._owners.values() if (leaf := ref()) is not None]
        if leaves and follow.owns(optimizer, leaves):
            self._commit()
        elif self.boundary.open and self.boundary.foreign_step():
            distributed.warn_once_on_first_rank(
                f"{type(optimizer).__name__} has stepped {FOREIGN_STEPS} times and owns no parameter that the queries of this "
                f"{type(self).__name__} were computed from, so its queue does not move. Give the optimiser the encoder's "
                "parameters, or call criterion.step() after each step"
            )

    def _commit(self) -> None:
        staged = self.boundary.take()
        if staged:
            enqueue(self.queue, staged, self.gather_distributed)

    @eager
    def _share(self) -> None:
        if not self._shared and self.gather_distributed:
            distributed.refuse_join()
            share_queue(self.queue)
        self._shared = True

    @eager
    def _stage(self, query: Tensor, keys: Tensor, loss: Tensor) -> None:
        first = next(_leaves(query), None)
        known = self._owners.get(id(first))
        if first is not None and (known is None or known() is not first):
            # The whole graph is walked only when its first leaf is new, which is once in a training.
            alive = {number: ref for number, ref in self._owners.items() if ref() is not None}
            self._owners = {**alive, **{id(leaf): weakref.ref(leaf) for leaf in _leaves(query)}}
            self.boundary.sharded = distributed.sharded_anywhere()
        self.boundary.stage([keys], loss, first, limit=self.queue.size)  # type: ignore[arg-type]
        follow.follow_optimizer_steps(self)

    def _check(self, query: Tensor, key: Tensor) -> None:
        for name, tensor in (("query", query), ("key", key)):
            if tensor.ndim != 2 or tensor.shape[1] != self.queue.dim:
                cure = (
                    f"build the loss with {self.resized(tensor.shape[1])}"
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

    def resized(self, dim: int) -> str:
        """Say how to build this loss for keys of another dimension."""
        return f"dim={dim}"

    def extra_repr(self) -> str:
        """Show the settings in ``repr``."""
        return f"temperature={self.temperature}, gather_distributed={self.gather_distributed}"

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._reset()

    def __getstate__(self) -> dict[str, Any]:
        # Weak references cannot be pickled, and staged keys belong to the step of the original.
        dropped = ("boundary", "_owners", "_shared")
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
