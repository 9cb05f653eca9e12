"""Queues that are filled at optimiser steps, by what forward passes have staged."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moco_plugins import KeyQueue, distributed


@torch.no_grad()
def enqueue(queue: KeyQueue, staged: Iterable[Tensor], gather: bool) -> None:
    """Put staged keys, (N, D) each, into the queue; with ``gather`` those of all ranks, in rank order.

    With ``gather`` every rank must take part, also one that has nothing staged.
    """
    keys = torch.cat([queue.keys[:0], *staged])
    if gather and distributed.world_size() > 1:
        keys = torch.cat(distributed.gather_rows(keys))
    queue.enqueue(keys)


def share_queue(queue: KeyQueue) -> None:
    """Give all ranks the queue of rank 0."""
    distributed.broadcast_from_first([queue.keys, queue.ptr, queue.filled, queue.skipped])
