"""MoCo's loss with its queue, for MMEngine models that have encoders of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moco_plugins.core.queue_loss import QueueLoss


class MoCoLoss(QueueLoss):
    """InfoNCE of queries and keys against a queue: ``loss = moco_loss(query, key)``, from a config.

    :class:`moco_plugins.queue_loss.QueueLoss`: the keys of a training step enter the queue when the optimiser that owns
    the encoder of the query has really stepped. Moving the key encoder is the model's own business;
    ``moco_plugins.MoCo`` does both.

    Args:
        dim: D, dimension of queries and keys; 128.
        queue_size: K; 65536 (arXiv:1911.05722, section 4.1).
        temperature: T; 0.2 (arXiv:2003.04297, section 3); v1 has 0.07.
        in_batch_negatives: the other keys of the batch are negatives too; False as in the paper.
        loss_weight: factor of the loss; 1.
        options: ``gather_distributed``, ``fill``, ``resize``, see there.
    """

    def __init__(
        self,
        dim: int = 128,
        queue_size: int = 65536,
        temperature: float = 0.2,
        in_batch_negatives: bool = False,
        loss_weight: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(queue_size, dim, temperature, in_batch_negatives, **options)
        self.loss_weight = loss_weight

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the loss, 0-dim, of queries (N, D) and their keys (N, D); neither has to be normalised."""
        return self.loss_weight * super().forward(query, key)
