"""What MoCo needs of several processes. The framework makes the process group; here it is only asked."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_size_groups: dict[Any, Any] = {}


def world_size() -> int:
    """Number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _host_group() -> Any:
    """A group that exchanges host tensors: counts travel without the device being waited for. Made once, by all."""
    default = dist.group.WORLD
    if default not in _size_groups:
        backend = str(dist.get_backend(default))
        if "gloo" in backend or "mpi" in backend:
            _size_groups[default] = default
        else:
            _size_groups.clear()
            _size_groups[default] = dist.new_group(backend="gloo") if dist.is_gloo_available() else None
    return _size_groups[default]


def row_counts(count: int, device: torch.device) -> list[int]:
    """How many rows each rank has."""
    group = _host_group()
    where = torch.device("cpu") if group is not None else device
    mine = torch.tensor([count], dtype=torch.long, device=where)
    counts = [torch.zeros_like(mine) for _ in range(world_size())]
    dist.all_gather(counts, mine, group=group)
    return [int(c) for c in counts]


@torch.no_grad()
def gather_rows(tensor: Tensor) -> list[Tensor]:
    """Return every rank's rows, in rank order; ranks may have different numbers of rows. No gradient."""
    if world_size() == 1:
        return [tensor.detach()]
    counts = row_counts(tensor.shape[0], tensor.device)
    most = max(counts)
    padded = tensor.detach().contiguous()
    if padded.shape[0] < most:
        padded = torch.cat([padded, padded.new_zeros(most - padded.shape[0], *padded.shape[1:])])
    rows = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(rows, padded)
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


@torch.no_grad()
def exchange_rows(parts: list[Tensor]) -> list[Tensor]:
    """Give part r to rank r and return what each rank had for this one, in rank order; only these rows travel."""
    if world_size() == 1:
        return parts
    mine = parts[rank()]
    gives = [len(part) for part in parts]
    flat = mine.new_empty(len(mine) * len(parts), *mine.shape[1:])
    dist.all_to_all_single(flat, torch.cat(parts).contiguous(), [len(mine)] * len(parts), gives)
    return list(flat.split(len(mine)))


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor]) -> None:
    """Overwrite the tensors of all ranks with rank 0's, in place."""
    if world_size() == 1:
        return
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)


def number_of_first(number: int, device: torch.device) -> int:
    """Return rank 0's number on all ranks."""
    if world_size() == 1:
        return number
    carrier = torch.tensor(number, device=device)
    dist.broadcast(carrier, src=0)
    return int(carrier)


def is_sharded(modules: Iterable[nn.Module]) -> bool:
    """Whether ``fully_shard`` has shared out parameters of one of the modules among the ranks."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported, a second's work, by those only who use it
    kind = getattr(fsdp, "FSDPModule", None)
    return kind is not None and any(isinstance(part, kind) for part in modules)


def is_flattened(module: nn.Module) -> bool:
    """Whether FSDP of the first version is around or within a module: it makes one flat parameter of many."""
    inner = {id(part) for part in module.modules()}
    return any(id(thing) in inner or any(part is module for part in thing.modules()) for thing in _fsdp(1))


def sharded_anywhere() -> bool:
    """Whether there is any module in this process whose parameters FSDP, of either version, has shared out."""
    return bool(_fsdp(1) or _fsdp(2))


def _fsdp(version: int) -> list[Any]:
    """The modules in this process that FSDP of a version manages."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported, a second's work, by those only who use it
    kind = getattr(fsdp, {1: "FullyShardedDataParallel", 2: "FSDPModule"}[version], None)
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)] if kind is not None else []


def refuse_join() -> None:
    """Raise where ranks may run out of batches one by one, in ``model.join()``: the others would wait for their keys.

    Raises:
        RuntimeError: some module or optimiser is in such a context.
    """
    join = sys.modules.get("torch.distributed.algorithms.join")
    if world_size() == 1 or join is None:
        return
    for thing in gc.get_objects():
        if issubclass(type(thing), join.Joinable):
            config = getattr(thing, "_join_config", None)
            if config is not None and config.enable and not config.throw_on_early_termination:
                raise RuntimeError(
                    "the training is in a join() context, in which ranks may have different numbers of batches, and MoCo's "
                    "ranks exchange keys at each step: give all ranks equally many batches (drop_last=True, a "
                    "DistributedSampler), or end them together, join(throw_on_early_termination=True)"
                )


def warn_once_on_first_rank(message: str) -> None:
    """Warn, on rank 0 only."""
    if rank() == 0:
        warnings.warn(message, stacklevel=3)


def on_first_rank(action: Callable[[], object], device: torch.device) -> bool:
    """Carry out ``action`` on the first rank; where it raises, all ranks do, so that none waits for the others.

    Returns on all ranks whether it returned something true.

    Raises:
        RuntimeError: on the other ranks; on the first it is what the action raised.
    """
    error: BaseException | None = None
    told = False
    if rank() == 0:
        try:
            told = bool(action())
        except BaseException as raised:
            error = raised
    outcome = number_of_first(2 if error is not None else int(told), device)
    if error is not None:
        raise error
    if outcome == 2:
        raise RuntimeError("the first process has stopped; its error says why")
    return outcome == 1
