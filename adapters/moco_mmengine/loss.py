"""MoCo's loss with its queue, for MMEngine models that have encoders of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from moco_plugins import distributed, follow
from moco_plugins.infonce import info_nce
from moco_plugins.key_queue import KeyQueue


class MoCoLoss(nn.Module):
    """InfoNCE of queries and keys against a queue: ``loss = moco_loss(query, key)``.

    The keys of all forward passes since the last step enter the queue, on all ranks alike, when an optimiser has really
    stepped: right under accumulation and for steps skipped by a GradScaler. In eval mode nothing enters. Moving the key
    encoder is the model's own business; ``moco_plugins.MoCo`` does both.

    Args:
        dim: D, dimension of queries and keys; 128.
        queue_size: K; 65536 (arXiv:1911.05722, section 4.1).
        temperature: T; 0.2 (arXiv:2003.04297, section 3); v1 has 0.07.
        in_batch_negatives: the other keys of the batch are negatives too; False as in the paper.
        loss_weight: factor of the loss; 1.
        queue_options: of :class:`moco_plugins.KeyQueue`: fill, resize.
    """

    def __init__(
        self,
        dim: int = 128,
        queue_size: int = 65536,
        temperature: float = 0.2,
        in_batch_negatives: bool = False,
        loss_weight: float = 1.0,
        **queue_options: Any,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be greater than 0 (0.07 in MoCo v1, 0.2 in v2)")
        self.queue = KeyQueue(queue_size, dim, **queue_options)
        self.temperature, self.in_batch_negatives, self.loss_weight = temperature, in_batch_negatives, loss_weight
        self._staged: list[Tensor] = []
        self._same_on_all_ranks = False
        follow.follow_optimizer_steps(self)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the loss, 0-dim, of queries (N, D) and their keys (N, D); both are normalised here, keys are detached."""
        if self.training and not self._same_on_all_ranks:
            distributed.broadcast_from_first(self.queue.state_dict().values())
            self._same_on_all_ranks = True
        with torch.autocast(query.device.type, enabled=False):
            q, k = F.normalize(query.float(), dim=1), F.normalize(key.detach().float(), dim=1)
            loss = info_nce(q, k, self.queue.negatives(), self.temperature, self.in_batch_negatives)
        if self.training and loss.requires_grad:
            self._staged.append(k)
        return self.loss_weight * loss

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Enqueue what is staged; called after every step."""
        staged, self._staged = self._staged, []
        if staged:
            self.queue.enqueue(torch.cat(distributed.gather_rows(torch.cat(staged))))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._staged = []
        follow.follow_optimizer_steps(self)
