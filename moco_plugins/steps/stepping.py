"""What happens around a MoCo's training steps: before the first, after each forward pass, at each optimiser step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import distributed
from .boundary import FOREIGN_STEPS, OWNED_STEPS, StepBoundary
from .eager import eager
from .follow import parameter_ids
from .pairing import copy_module, pair_buffers, pair_parameters
from .shared_queue import enqueue, share_queue


class Stepped(Protocol):
    """What is needed here of a MoCo: two encoders, a queue between them, and what has waited for the step."""

    boundary: StepBoundary
    prepared: bool
    #: None, or what has ``enqueue(keys)`` and ``state_dict()``.
    queue: Any
    gather_distributed: bool
    bn_buffers: str
    #: ``rule(key_tensors, query_tensors, momentum)``
    momentum_rule: Any
    #: ``average.move(pairs, momentum, rule)``, ``.start()``, ``.tensors()``, ``.trust()``: keeps averages in float32.
    average: Any

    @property
    def query_encoder(self) -> nn.Module:
        """The encoder that learns."""

    @property
    def key_encoder(self) -> nn.Module:
        """The encoder that follows."""

    @property
    def momentum(self) -> float:
        """The fraction of the key encoder that is kept."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As in nn.Module."""

    def modules(self) -> Iterator[nn.Module]:
        """As in nn.Module."""


@eager
def prepare(moco: Stepped) -> None:
    """Before the first training step: key encoder equal to the query encoder, and the same state on all ranks."""
    steps = moco.boundary.steps
    moco.boundary.steps = distributed.number_of_first(steps, next(moco.key_encoder.parameters()).device)
    if steps == 0:  # weights may have been loaded into the query encoder
        copy_module(moco.query_encoder, moco.key_encoder)
        moco.average.start()
    distributed.broadcast_from_first(
        [*moco.key_encoder.parameters(), *moco.key_encoder.buffers(), *moco.average.tensors()]
    )
    moco.average.trust()
    if moco.queue is not None and moco.gather_distributed:
        share_queue(moco.queue)
    _check_precision(moco)
    moco.boundary.sharded = distributed.is_sharded(moco.modules())
    moco.prepared = True


def _check_precision(moco: Stepped) -> None:
    *_, last = moco.key_encoder.parameters()
    eps = min(torch.finfo(last.dtype).eps, torch.finfo(torch.float32).eps)  # averages are kept in float32 or better
    if moco.momentum < 1 and 1 - moco.momentum < 16 * eps:
        distributed.warn_once_on_first_rank(
            f"momentum={moco.momentum} is too near to 1 for averages in float32: steps of {1 - moco.momentum:.2g} of the way "
            "are rounded off, and the key encoder stands still. Take 0.9999, or encoders in float64"
        )


@eager
def stage(
    moco: Stepped, keys: list[Tensor], loss: Tensor, anchor: nn.Parameter | None, known: Mapping[str, Tensor]
) -> None:
    """After a forward pass: keep its keys for the step, with what is known of them (N) for the queue's columns.

    ``anchor`` is a parameter that the loss's gradient reaches.
    """
    _report_left_out(moco)
    # keys[0] is of the second view and keys[1] of the first: they are enqueued in the order of the views.
    queue: Any = moco.queue[0] if isinstance(moco.queue, nn.ModuleList) else moco.queue
    columns = [known.get(name, torch.full_like(keys[0][:, 0], -1)) for name in getattr(queue, "columns", ())]
    moco.boundary.stage([*reversed(keys), *columns], loss, anchor, limit=queue.size if queue is not None else 0)


def after_step(moco: Stepped, optimizer: Optimizer) -> None:
    """Commit the step that an optimiser has taken, if it owns parameters of the query encoder."""
    if not moco.boundary.open:
        return
    owned = parameter_ids(optimizer)
    if any(id(p) in owned for p in moco.query_encoder.parameters()):
        commit(moco, owned)
    elif moco.boundary.staged:
        _report_foreign(moco, optimizer)


@eager
@torch.no_grad()
def commit(moco: Stepped, owned: set[int] | None) -> None:
    """At a step: move the key parameters whose query is owned (None: all), each once, and enqueue what is staged."""
    staged = moco.boundary.take()
    if staged:
        _move_buffers(moco)
        if moco.queue is not None:
            enqueue(moco.queue, staged, moco.gather_distributed)
    if owned is not None and moco.boundary.steps <= OWNED_STEPS:
        moco.boundary.own(name for name, p in moco.named_parameters() if id(p) in owned)
    due = moco.boundary.due(pair_parameters(moco.query_encoder, moco.key_encoder), owned)
    moco.average.move(due, moco.momentum, moco.momentum_rule)


def _move_buffers(moco: Stepped) -> None:
    if moco.bn_buffers == "own":
        return
    for name, query, key in pair_buffers(moco.query_encoder, moco.key_encoder):
        if moco.bn_buffers == "ema" and key.is_floating_point():
            moco.average.move([(name, query, key)], moco.momentum, _lerp)
        else:  # counts (num_batches_tracked) are never averaged
            key.copy_(query)


def _lerp(keys: Sequence[Tensor], queries: Sequence[Tensor], momentum: float) -> None:
    for key, query in zip(keys, queries, strict=True):
        key.lerp_(query, 1.0 - momentum)


def _report_left_out(moco: Stepped) -> None:
    left_out = moco.boundary.not_owned(name for name, p in moco.named_parameters() if p.requires_grad)
    if left_out:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        distributed.warn_once_on_first_rank(
            f"no optimiser that has stepped owns {', '.join(left_out[:3])}{more}, so these parameters are not trained. Give "
            "the optimiser moco.parameters(), or set requires_grad_(False) where that is meant"
        )


def _report_foreign(moco: Stepped, optimizer: Optimizer) -> None:
    """Count a step of an optimiser that owns none of the query parameters while keys wait for one that does."""
    if moco.boundary.foreign_step():
        distributed.warn_once_on_first_rank(
            f"{type(optimizer).__name__} has stepped {FOREIGN_STEPS} times and owns no parameter of this MoCo's query "
            "encoder, so the key encoder and the queue do not move. Give the optimiser moco.parameters(), or call "
            "moco.step() after each step with follow_optimizer=False"
        )
