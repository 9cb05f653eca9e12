"""Queues that all ranks share, filled at optimiser steps by what forward passes have staged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from . import distributed


@torch.no_grad()
def enqueue(queue: Any, staged: Iterable[tuple[Tensor, ...]], gather: bool) -> None:
    """Put what forward passes have staged into the queue: of each pass the keys (N, D) of each view, then its columns (N).

    They go in view by view, so that a batch in parts fills the queue in the same order as a whole one. With ``gather``
    the keys of all ranks go in, in rank order; then every rank must take part. Where there is a queue for each view
    (a ModuleList), each takes its own.
    """
    passes = list(staged)
    queues: list[Any] = list(queue) if isinstance(queue, nn.ModuleList) else [queue]
    names = list(getattr(queues[0], "columns", ()))
    views = len(passes[0]) - len(names)
    keys = torch.cat([torch.stack(parts[:views], dim=1) for parts in passes])  # N x views x D
    columns = {name: torch.cat([parts[views + i] for parts in passes]) for i, name in enumerate(names)}  # N each
    if gather:
        keys = torch.cat(distributed.gather_rows(keys))
        columns = {name: torch.cat(distributed.gather_rows(column)) for name, column in columns.items()}
    for part, own in zip(keys.transpose(0, 1).chunk(len(queues)), queues, strict=True):
        known = ({name: column.repeat(len(part)) for name, column in columns.items()},) if names else ()
        own.enqueue(part.flatten(0, 1), *known)


def share_queue(queue: Any) -> None:
    """Give all ranks the queue of rank 0, or each its share of a queue that is shared out."""
    if hasattr(queue, "share_out"):
        queue.share_out()
        return
    distributed.broadcast_from_first(value for value in queue.state_dict().values() if isinstance(value, Tensor))
