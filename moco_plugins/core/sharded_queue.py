"""A queue that is shared out among the ranks: each keeps K / R rows, and queries travel to them instead of keys.

Each rank answers the queries of all with the logsumexp and the softmax-weighted mean of its own rows; the answers are joined
exactly, as in ring attention. What travels in a step is the queries, the answers and the keys of the batch, N R D numbers
each; it does not depend on K.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..steps import distributed
from ..steps.eager import eager
from . import attention
from .contrast import class_sums, matches
from .key_queue import KeyQueue


class ShardedKeyQueue(KeyQueue):
    """:class:`moco_plugins.KeyQueue` of which each rank holds the rows K r / R to K (r + 1) / R.

    Whole until the first training step, when there is a process group. ``ptr``, ``filled``, ``skipped`` and ``size`` are those
    of the whole. ``state_dict()`` holds the whole queue and is then a collective: call it on all ranks, as with FSDP; it
    loads on any number of ranks, and into a plain queue.
    """

    shared = False
    start = 0

    @property
    def rows(self) -> int:
        """How many rows are here."""
        return self.keys.shape[0]

    @eager
    def share_out(self) -> None:
        """Keep this rank's rows only; all ranks must take part.

        Raises:
            RuntimeError: there is no process group.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "gather='sharded' shares the queue out among processes, and there is no process group: start with torchrun and "
                "torch.distributed.init_process_group, or leave gather out"
            )
        if self.shared:
            return
        distributed.broadcast_from_first([self.ptr, self.filled, self.skipped])
        rank, world = distributed.rank(), distributed.world_size()
        self.start, stop = self.size * rank // world, self.size * (rank + 1) // world
        self.keys = self.keys[self.start : stop].clone()
        self.columns = {name: column[self.start : stop].clone() for name, column in self.columns.items()}
        self.shared = True

    def negatives(self) -> Tensor:
        """The rows to contrast with that are here."""
        if not self.shared:
            return super().negatives()
        return (
            self.keys if self.fill == "random" else self.keys[: max(0, min(self.rows, int(self.filled) - self.start))]
        )

    def bank(self) -> Any:
        """What losses contrast with: all rows, wherever they are."""
        rows = self.negatives()
        if not self.shared:
            return rows
        total = self.size if self.fill == "random" else int(self.filled)
        return _RowsOfAll(rows, {name: column[: len(rows)] for name, column in self.columns.items()}, total)

    def _write(self, target: Tensor, newest: Tensor, finite: Tensor, values: Mapping[str, Tensor]) -> None:
        if not self.shared:
            super()._write(target, newest, finite, values)
            return
        mine = (finite & (target >= self.start) & (target < self.start + self.rows)).nonzero()[:, 0]
        for name, value in values.items():
            own = self.keys if name == "keys" else self.columns[name]
            own.index_copy_(0, target[mine] - self.start, value[newest[mine]].to(own.dtype))

    def ordered(self) -> Tensor:
        """Not of a part."""
        if self.shared:
            raise RuntimeError("a queue that is shared out has no order on one rank; take state_dict(), on all ranks")
        return super().ordered()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.shared:
            for name in ("keys", *(f"columns.{column}" for column in self.columns)):
                destination[prefix + name] = torch.cat(distributed.gather_rows(destination[prefix + name]))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        shared = self.shared
        if shared:  # whole for a moment
            self.keys = self.keys.new_zeros(self.size, self.dim)
            self.columns = {name: column.new_zeros(self.size) for name, column in self.columns.items()}
            self.shared, self.start = False, 0
        super()._load_from_state_dict(state_dict, prefix, *args)
        if shared:
            self.share_out()


class _RowsOfAll:
    """The keys of all ranks: those that are here answer for themselves, the others are asked."""

    def __init__(self, rows: Tensor, columns: Mapping[str, Tensor], total: int) -> None:
        self._rows, self._columns = rows, columns
        self.shape, self.dtype = (total, rows.shape[1]), rows.dtype

    def attend(self, query: Tensor, query_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        own = self._columns.get("id")
        asked = [query.to(self.dtype)] + ([query_ids] if query_ids is not None and own is not None else [])

        def answer(queries: Tensor, *ids: Tensor) -> Tensor:
            if not len(self._rows):
                return torch.cat([torch.zeros_like(queries), queries.new_full((len(queries), 1), -torch.inf)], 1)
            mean, lse = (
                attention.attend_apart(queries, self._rows, ids[0], own)  # type: ignore[arg-type]
                if ids
                else attention.attend(queries, self._rows)
            )
            return torch.cat([mean, lse[:, None].to(mean.dtype)], 1)

        return reduce(attention.join, [(part[:, :-1], part[:, -1]) for part in _ask(answer, *asked)])

    def matches(self, query_ids: Tensor) -> Tensor:
        own = self._columns.get("id")
        if own is None:
            return torch.zeros_like(query_ids)
        return sum(_ask(lambda ids: matches(ids, own), query_ids), start=torch.zeros_like(query_ids))

    def sums(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        own = self._columns["label"]

        def answer(labels: Tensor) -> Tensor:
            sums, numbers = class_sums(self._rows, own, labels)
            return torch.cat([sums, numbers[:, None]], 1)

        parts = torch.stack(_ask(answer, labels)).sum(0)
        return parts[:, :-1], parts[:, -1]


@eager
@torch.no_grad()
def _ask(answer: Callable[..., Tensor], *mine: Tensor) -> list[Tensor]:
    """Let each rank answer the rows of all; return what the ranks say of this one's, in rank order."""
    everyone = [distributed.gather_rows(tensor) for tensor in mine]
    counts = [len(part) for part in everyone[0]]
    answers = answer(*(torch.cat(parts) for parts in everyone))
    return distributed.exchange_rows(list(answers.split(counts)))
