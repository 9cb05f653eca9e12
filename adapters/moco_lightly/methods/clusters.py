"""Methods that compare soft assignments to prototypes, without a teacher: SwAV."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moco_plugins import KeyQueue
from moco_plugins.core.normalise import unit_rows
from moco_plugins.steps import distributed
from moco_plugins.steps.shared_queue import enqueue, share_queue

from ..frameworks import lightly
from .base import SteppedMethod, call_frozen, full_precision, with_crops


class SwAV(SteppedMethod):
    """SwAV (Caron et al. 2020, arXiv:2006.09882) with two views: predict the other view's assignment to prototypes.

    Args:
        backbone: images -> (N, feature_dim).
        feature_dim: width of the backbone's features.
        projection_dim: D; 128.
        hidden_dim: width of the head's hidden layer; 2048.
        prototypes: number of prototypes; 3000.
        temperature: T; 0.1.
        sinkhorn_epsilon, sinkhorn_iterations: 0.05 and 3.
        queue_size: earlier projections that take part in the assignment, per view and in each process; 3840, the 15
            batches of 256 of lightly's benchmark. 0 for none, which large batches do not need.
        queue_start: fraction of the training after which the queue fills; 0.15. It is used once it is full.
        frozen: fraction of the training during which the prototypes stay as they are; 0.01, the first of lightly's 100
            epochs. This and ``queue_start`` are without effect while ``total_steps`` is unknown.
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int,
        projection_dim: int = 128,
        hidden_dim: int = 2048,
        prototypes: int = 3000,
        temperature: float = 0.1,
        sinkhorn_epsilon: float = 0.05,
        sinkhorn_iterations: int = 3,
        queue_size: int = 3840,
        queue_start: float = 0.15,
        frozen: float = 0.01,
    ) -> None:
        heads = lightly("models.modules")
        super().__init__(backbone, feature_dim, heads.SwaVProjectionHead(feature_dim, hidden_dim, projection_dim))
        self.prototypes = heads.SwaVPrototypes(projection_dim, prototypes)
        self.criterion = lightly("loss").SwaVLoss(
            temperature, sinkhorn_iterations, sinkhorn_epsilon, sinkhorn_gather_distributed=True
        )
        # One queue a view, the same on all ranks; each rank brings its share of it to the assignment, which spans all.
        count = 2 if queue_size else 0
        self.queues: Any = nn.ModuleList(KeyQueue(queue_size, projection_dim, fill="empty") for _ in range(count))
        self.queue_start, self.frozen = queue_start, frozen
        self.prototypes.normalize()

    def prepare(self) -> None:
        """Start with prototypes of unit length, and the same queues on all ranks."""
        if self.steps == 0:  # else they are already, and once more would change their last bits
            self.prototypes.normalize()
        for queue in self.queues:
            share_queue(queue)

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        """Return the loss of two views of a batch, and any local crops, each (N, C, H, W); 0-dim."""
        both, crops = with_crops(views)
        self._begin()
        projections = [unit_rows(self.encoder(view)) for view in both]  # N x D each
        if crops:  # they predict the assignments of both views, and are assigned to nothing themselves
            projections += unit_rows(self.encoder(torch.cat(crops))).chunk(len(crops))
        frozen = self._progress(self.frozen)
        logits = [call_frozen(self.prototypes, "", z) if frozen else self.prototypes(z) for z in projections]  # N x P
        queued = self._queued_logits()
        loss = full_precision(lambda *rows: self.criterion(list(rows[:2]), list(rows[2:]), queued), *logits).squeeze()
        early = not self.queues or self._progress(self.queue_start)
        rows = [z[:0] if early else z for z in projections[:2]]
        self._end(loss, projections[0], *rows, limit=self.queues[0].size if self.queues else 1)
        return loss

    def _progress(self, fraction: float) -> bool:
        """Whether the training is still in its first ``fraction``."""
        return self.steps < fraction * (self.total_steps or 0)

    @torch.no_grad()
    def _queued_logits(self) -> list[Tensor] | None:
        banks = [queue.negatives() for queue in self.queues]
        if not banks or any(bank.shape[0] < queue.size for bank, queue in zip(banks, self.queues, strict=True)):
            return None
        world, rank = distributed.world_size(), distributed.rank()
        share = banks[0].shape[0] // world
        with torch.autocast(banks[0].device.type, enabled=False):
            return [self.prototypes(bank[rank * share : (rank + 1) * share]) for bank in banks]

    def on_step(self, staged: list[tuple[Tensor, ...]]) -> None:
        """Fill the queues, and bring the prototypes back to unit length."""
        for view, queue in enumerate(self.queues):
            enqueue(queue, [(rows[view],) for rows in staged], gather=True)
        self.prototypes.normalize()
