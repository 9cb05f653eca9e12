"""What a MoCo's queries are contrasted with, and what is known of it: labels, and ids of images."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..steps import distributed
from .contrast import ContrastiveLoss, check_rows

#: The queue's column and the argument of ``moco(views, labels=..., ids=...)`` and of losses.
ARGUMENTS = {"label": "labels", "id": "ids"}


def arguments_of(loss: ContrastiveLoss) -> dict[str, bool]:
    """The arguments of a loss, and whether each has to be given."""
    try:
        parameters = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):
        return {}
    return {p.name: p.default is p.empty for p in parameters}


def queue_options(loss: ContrastiveLoss, options: Mapping[str, Any]) -> dict[str, Any]:
    """The queue's options, with a column of labels where the loss cannot do without."""
    if not arguments_of(loss).get("labels"):
        return dict(options)
    return {**options, "columns": {"label": torch.long, **(options.get("columns") or {})}}


def gathering(gather: str | None, gather_distributed: bool, queue: str) -> tuple[bool, str]:
    """Return whether the queue takes the keys of all ranks, and the name of the queue that does it so.

    Raises:
        ValueError: no such way, or a queue that cannot be shared out.
    """
    if gather not in (None, "whole", "own", "sharded"):
        raise ValueError(f"gather={gather!r} must be 'whole', 'own' or 'sharded'")
    if gather != "sharded":
        return (gather_distributed if gather is None else gather == "whole"), queue
    if queue not in ("ring", "sharded"):
        raise ValueError(f"gather='sharded' shares out the built-in queue, and queue={queue!r}; leave one of them out")
    return True, "sharded"


def asks_for(loss: ContrastiveLoss, queue: Any) -> tuple[str, ...]:
    """Which of "labels" and "ids" a training step needs."""
    columns = getattr(queue, "columns", {})
    needed = arguments_of(loss)
    return tuple(named for column, named in ARGUMENTS.items() if column in columns or needed.get(named))


def known_of(
    query: Tensor, labels: Tensor | None, ids: Tensor | None, asked: tuple[str, ...], training: bool
) -> dict[str, Tensor]:
    """Return what is known of a batch and asked for, by column: (N) each, on the device of the queries (N, D).

    Raises:
        ValueError: a training step without labels or ids that are asked for, or of a wrong shape.
    """
    known = {}
    for column, named in ARGUMENTS.items():
        values = labels if column == "label" else ids
        check_rows(named, values, query)
        if named not in asked:
            continue
        if values is None and training:
            raise ValueError(
                f"{named}=None, and the loss or the queue's column {column!r} needs them: moco(views, {named}=...), (N,) whole "
                "numbers, -1 where unknown"
            )
        known[column] = _minus_one(query) if values is None else values.to(query.device)
    return known


def _minus_one(query: Tensor) -> Tensor:
    return torch.full((query.shape[0],), -1, device=query.device)


def contrast_with(
    loss: ContrastiveLoss,
    query: Tensor,
    key: Tensor,
    queue: Any,
    temperature: float | Tensor,
    in_batch: bool,
    across_ranks: bool,
    known: Mapping[str, Tensor],
) -> tuple[Tensor, int]:
    """Return the loss of queries (N, D) with their keys (N, D) against queue and batch, and the number of negatives.

    ``across_ranks``: the keys of other ranks' batches are in the batch too.
    """
    banks: list[Any] = []
    columns: dict[str, list[Tensor | None]] = {column: [] for column in ARGUMENTS}
    if queue is not None:
        bank = queue.bank() if hasattr(queue, "bank") else queue.negatives()
        banks.append(bank)
        for column, numbers in columns.items():
            own = getattr(queue, "columns", {}).get(column)
            numbers.append(own[: bank.shape[0]] if own is not None and isinstance(bank, Tensor) else None)
    if in_batch and across_ranks and distributed.world_size() > 1:
        banks += _of_others(key)
        for column, numbers in columns.items():
            numbers += _of_others(known[column]) if column in known else [None] * (distributed.world_size() - 1)
    count = sum(bank.shape[0] for bank in banks) + (key.shape[0] - 1 if in_batch else 0)
    takes = arguments_of(loss)
    named: dict[str, Any] = {}
    for column, argument in ARGUMENTS.items():
        if column in known and argument in takes:
            named |= {argument: known[column], f"negative_{argument}": columns[column]}
    together: Any = loss
    if len(banks) == 1:  # not a list, for losses that know no lists
        named |= {name: of[0] for name, of in named.items() if name.startswith("negative_")}
        return together(query, key, banks[0], temperature, in_batch, **named), count
    return together(query, key, banks, temperature, in_batch, **named), count


def _of_others(rows: Tensor) -> list[Any]:
    return [part for other, part in enumerate(distributed.gather_rows(rows)) if other != distributed.rank()]
