"""Queues that all ranks share, filled at optimiser steps by what forward passes have staged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import distributed


@torch.no_grad()
def enqueue(queue: Any, staged: Iterable[tuple[Tensor, ...]], gather: bool) -> None:
    """Put the staged keys of some forward passes into the queue, those of one pass being (N, D) for each view.

    They go in view by view, so that a batch in parts fills the queue in the same order as a whole one. With ``gather``
    the keys of all ranks go in, in rank order; then every rank must take part.
    """
    keys = torch.cat([torch.stack(views, dim=1) for views in staged])  # N x views x D
    if gather:
        keys = torch.cat(distributed.gather_rows(keys))
    queue.enqueue(keys.transpose(0, 1).flatten(0, 1))


def share_queue(queue: Any) -> None:
    """Give all ranks the queue of rank 0."""
    distributed.broadcast_from_first(value for value in queue.state_dict().values() if isinstance(value, Tensor))
