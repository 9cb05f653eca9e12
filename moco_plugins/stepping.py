"""What happens around a MoCo's training steps: before the first, after each forward pass, at each optimiser step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import batchnorm, distributed
from .boundary import FOREIGN_STEPS, OWNED_STEPS
from .eager import eager
from .momentum import copy_module, pair_buffers, pair_parameters
from .shared_queue import enqueue, share_queue

if TYPE_CHECKING:
    from .moco import MoCo


@eager
def prepare(moco: MoCo, batch: int) -> None:
    """Before the first training step: key encoder equal to the query encoder, and the same state on all ranks."""
    if moco.prepared:
        return
    if moco.steps == 0:  # weights may have been loaded into the query encoder
        copy_module(moco.query_encoder, moco.key_encoder)
    moco.boundary.steps = distributed.number_of_first(moco.steps, next(moco.key_encoder.parameters()).device)
    distributed.broadcast_from_first([*moco.key_encoder.parameters(), *moco.key_encoder.buffers()])
    if moco.queue is not None and moco.gather_distributed:
        share_queue(moco.queue)
    if moco.settings.shuffle_bn:
        problem = batchnorm.shuffles(moco.key_encoder, moco.bn_splits, batch)
        if problem:
            distributed.warn_once_on_first_rank(problem)
    _check_precision(moco)
    moco.boundary.sharded = distributed.is_sharded(moco)
    moco.prepared = True


def _check_precision(moco: MoCo) -> None:
    kind = next(p.dtype for p in moco.key_encoder.projector.parameters())
    if moco.momentum < 1 and 1 - moco.momentum < 16 * torch.finfo(kind).eps:
        distributed.warn_once_on_first_rank(
            f"the encoders are in {kind}, too coarse for momentum={moco.momentum}: steps of {1 - moco.momentum:.2g} of the "
            "way are rounded off, and the key encoder stands still. Keep the weights in float32 and use torch.autocast"
        )


@eager
def stage(moco: MoCo, keys: list[Tensor], loss: Tensor, key_images: Tensor) -> None:
    """After a forward pass: keep its keys for the step, and a snapshot for the drift probe."""
    if moco.drift_probe is not None:
        if moco.queue is not None:
            steps_in_queue = moco.queue.size // (key_images.shape[0] * len(keys) * distributed.world_size())
            moco.drift_probe.every = max(1, steps_in_queue // moco.drift_probe.keep)
        moco.drift_probe.take(moco.key_encoder, key_images, moco.steps)
    _report_left_out(moco)
    anchor = next((p for p in moco.query_encoder.projector.parameters() if p.requires_grad), None)
    # keys[0] is of the second view and keys[1] of the first: they are enqueued in the order of the views.
    moco.boundary.stage(reversed(keys), loss, anchor, limit=moco.settings.queue_size)


@eager
@torch.no_grad()
def commit(moco: MoCo, owned: set[int] | None) -> None:
    """At a step: move the key parameters whose query is owned (None: all), each once, and enqueue what is staged."""
    staged = moco.boundary.take()
    if staged:
        _move_buffers(moco)
        if moco.queue is not None:
            enqueue(moco.queue, staged, moco.gather_distributed)
    if owned is not None and moco.boundary.steps <= OWNED_STEPS:
        moco.boundary.own(name for name, p in moco.named_parameters() if id(p) in owned)
    due = moco.boundary.due(pair_parameters(moco.query_encoder, moco.key_encoder), owned)
    moco.momentum_rule([key for _, _, key in due], [query for _, query, _ in due], moco.momentum)


def _move_buffers(moco: MoCo) -> None:
    if moco.bn_buffers == "own":
        return
    for _, query, key in pair_buffers(moco.query_encoder, moco.key_encoder):
        if moco.bn_buffers == "ema" and key.is_floating_point():
            key.lerp_(query, 1.0 - moco.momentum)
        else:  # counts (num_batches_tracked) are never averaged
            key.copy_(query)


def _report_left_out(moco: MoCo) -> None:
    left_out = moco.boundary.not_owned(name for name, p in moco.named_parameters() if p.requires_grad)
    if left_out:
        more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
        distributed.warn_once_on_first_rank(
            f"no optimiser that has stepped owns {', '.join(left_out[:3])}{more}, so these parameters are not trained. Give "
            "the optimiser moco.parameters(), or set requires_grad_(False) where that is meant"
        )


def report_foreign(moco: MoCo, optimizer: Optimizer) -> None:
    """Count a step of an optimiser that owns none of the query parameters while keys wait for one that does."""
    if moco.boundary.foreign_step():
        distributed.warn_once_on_first_rank(
            f"{type(optimizer).__name__} has stepped {FOREIGN_STEPS} times and owns no parameter of this MoCo's query "
            "encoder, so the key encoder and the queue do not move. Give the optimiser moco.parameters(), or call "
            "moco.step() after each step with follow_optimizer=False"
        )
