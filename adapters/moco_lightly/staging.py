"""Keys that wait for the optimiser step before they enter a queue."""

from __future__ import annotations

import torch
from torch import Tensor

from moco_plugins import KeyQueue, distributed


class StagedKeys:
    """The keys of the forward passes since the last step. Never more rows than the queue can hold: older ones would be
    overwritten in any case, so somebody who never steps does not run out of memory.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.keys: list[Tensor] = []

    def __len__(self) -> int:
        return sum(keys.shape[0] for keys in self.keys)

    @torch.compiler.disable
    def add(self, keys: Tensor) -> None:
        """Stage keys (N, D)."""
        self.keys.append(keys.detach().clone())
        while len(self) - self.keys[0].shape[0] >= self.limit:
            del self.keys[0]

    def clear(self) -> None:
        """Forget what is staged."""
        self.keys = []

    @torch.no_grad()
    def commit(self, queue: KeyQueue, gather: bool) -> None:
        """Put what is staged into the queue, with ``gather`` that of all ranks, in rank order.

        With ``gather`` every rank must take part, also one that has nothing staged.
        """
        keys = torch.cat([queue.keys[:0], *self.keys])
        self.clear()
        if gather:
            keys = torch.cat(distributed.gather_rows(keys))
        queue.enqueue(keys)


def share_queue(queue: KeyQueue) -> None:
    """Give all ranks the queue of rank 0."""
    distributed.broadcast_from_first([queue.keys, queue.ptr, queue.filled, queue.skipped])
