"""Methods in which a predictor of one view meets the projection of the other, without a teacher: SimSiam and NNCLR."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moco_plugins import KeyQueue
from moco_plugins.core.normalise import unit_rows
from moco_plugins.steps.shared_queue import enqueue, share_queue

from ..frameworks import lightly
from .base import LightlyMethod, SteppedMethod, full_precision, pair


class SimSiam(LightlyMethod):
    """SimSiam (Chen & He 2021, arXiv:2011.10566): BYOL without a teacher.

    Args:
        backbone: images -> (N, feature_dim).
        feature_dim: width of the backbone's features.
        projection_dim: D; 2048.
        hidden_dim: width of the projection head's hidden layers; 2048.
        prediction_hidden_dim: width of the prediction head's hidden layer; 512, a quarter of D.
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int,
        projection_dim: int = 2048,
        hidden_dim: int = 2048,
        prediction_hidden_dim: int | None = None,
    ) -> None:
        heads = lightly("models.modules")
        super().__init__(backbone, feature_dim, heads.SimSiamProjectionHead(feature_dim, hidden_dim, projection_dim))
        narrow = prediction_hidden_dim or max(1, projection_dim // 4)
        self.predictor = heads.SimSiamPredictionHead(projection_dim, narrow, projection_dim)
        self.criterion = lightly("loss").NegativeCosineSimilarity()

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        """Return the loss of two views of a batch, each (N, C, H, W); 0-dim."""
        z0, z1 = (self.encoder(view) for view in pair(views))  # N x D each
        p0, p1 = self.predictor(z0), self.predictor(z1)
        loss = 0.5 * (full_precision(self.criterion, z0.detach(), p1) + full_precision(self.criterion, z1.detach(), p0))
        self._remember(loss, z0)
        return loss


class NNCLR(SteppedMethod):
    """NNCLR (Dwibedi et al. 2021, arXiv:2104.14548): the positive is the nearest neighbour among earlier projections.

    The neighbours come from a :class:`moco_plugins.KeyQueue` in place of lightly's memory bank: it is in the checkpoint,
    takes any batch size, and is filled once an optimiser step with the second view's projections of all ranks.

    Args:
        backbone: images -> (N, feature_dim).
        feature_dim: width of the backbone's features.
        projection_dim: D; 256.
        hidden_dim: width of the projection head's hidden layers; 2048.
        prediction_hidden_dim: width of the prediction head's hidden layer; 4096.
        queue_size: number of earlier projections; 4096.
        temperature: T; 0.5, as in lightly's benchmark (0.1 in the paper).
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int,
        projection_dim: int = 256,
        hidden_dim: int = 2048,
        prediction_hidden_dim: int = 4096,
        queue_size: int = 4096,
        temperature: float = 0.5,
    ) -> None:
        heads = lightly("models.modules")
        super().__init__(backbone, feature_dim, heads.NNCLRProjectionHead(feature_dim, hidden_dim, projection_dim))
        self.predictor = heads.NNCLRPredictionHead(projection_dim, prediction_hidden_dim, projection_dim)
        self.criterion = lightly("loss").NTXentLoss(temperature, gather_distributed=True)
        self.queue = KeyQueue(queue_size, projection_dim)

    def prepare(self) -> None:
        """Start with the same queue on all ranks."""
        share_queue(self.queue)

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        """Return the loss of two views of a batch, each (N, C, H, W); 0-dim."""
        first, second = pair(views)
        self._begin()
        z0, z1 = self.encoder(first), self.encoder(second)  # N x D each
        p0, p1 = self.predictor(z0), self.predictor(z1)
        loss = 0.5 * (
            full_precision(self.criterion, self._nearest(z0), p1)
            + full_precision(self.criterion, self._nearest(z1), p0)
        )
        self._end(loss, z0, z1, limit=self.queue.size)
        return loss

    @torch.no_grad()
    def _nearest(self, projections: Tensor) -> Tensor:
        keys = self.queue.negatives()
        rows = unit_rows(projections).to(keys.dtype)
        return keys[(rows @ keys.T).argmax(1)]

    def on_step(self, staged: list[tuple[Tensor, ...]]) -> None:
        """Fill the queue."""
        enqueue(self.queue, staged, gather=True)
