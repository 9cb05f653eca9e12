"""MoCo once more, written plainly from the papers, for the tests to compare with. It shares nothing with the package.

The authors' order: the key encoder moves at the start of a forward pass, the logits are dense and use a clone of the
queue, and the keys enter last, row by row (He et al. 2020, arXiv:1911.05722, algorithm 1).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def small_backbone(batch_norm: bool = False) -> nn.Sequential:
    """Images (N, 3, 2, 2) -> (N, 16)."""
    middle = [nn.BatchNorm1d(24)] if batch_norm else []
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 24), *middle, nn.Tanh(), nn.Linear(24, 16))


def small_views(n: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Two views of n images for :func:`small_backbone`: the second is the first with noise."""
    first = torch.randn(n, 3, 2, 2, dtype=dtype)
    return [first, first + 0.3 * torch.randn(n, 3, 2, 2, dtype=dtype)]


def plain_info_nce(
    query: Tensor, key: Tensor, negatives: Tensor, temperature: float, others: Tensor | None = None, own: int = 0
) -> Tensor:
    """Cross-entropy of the positive among positive and negatives; ``others``: keys of the batch, ``own``: row of key 0."""
    logits = torch.cat([(query * key).sum(1, keepdim=True), query @ negatives.T], 1)  # N x (1 + K)
    if others is not None:
        similarity = query @ others.T
        positive = torch.arange(len(query))
        similarity[positive, own + positive] = -torch.inf  # it is there already
        logits = torch.cat([logits, similarity], 1)
    return F.cross_entropy(logits / temperature, torch.zeros(len(query), dtype=torch.long))


class PlainMoCo:
    """MoCo by the paper. ``encode_query`` is the query encoder, with its predictor where there is one."""

    def __init__(
        self,
        query_encoder: nn.Module,
        key_encoder: nn.Module,
        queue: Tensor | None,
        momentum: float | Callable[[int], float],
        temperature: float,
        symmetric: bool = False,
        in_batch_negatives: bool = False,
        predictor: nn.Module | None = None,
    ) -> None:
        self.query_encoder, self.key_encoder = copy.deepcopy(query_encoder), copy.deepcopy(key_encoder)
        self.predictor = copy.deepcopy(predictor) if predictor is not None else nn.Identity()
        width = next(reversed(list(key_encoder.parameters()))).shape[0]
        self.queue = queue.clone() if queue is not None else torch.zeros(0, width, dtype=torch.float64)
        self.pointer = self.step = 0
        self.momentum, self.temperature = momentum, temperature
        self.symmetric, self.in_batch_negatives = symmetric, in_batch_negatives

    def to(self, dtype: torch.dtype) -> None:
        for module in (self.query_encoder, self.key_encoder, self.predictor):
            module.to(dtype)
        self.queue = self.queue.to(dtype)

    def parameters(self) -> list[nn.Parameter]:
        return [*self.query_encoder.parameters(), *self.predictor.parameters()]

    @torch.no_grad()
    def move_key_encoder(self) -> None:
        m = self.momentum(self.step) if callable(self.momentum) else self.momentum
        for k, q in zip(self.key_encoder.parameters(), self.query_encoder.parameters(), strict=True):
            k.copy_(m * k + (1 - m) * q)

    def train_step(self, views: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> float:
        """One step on one whole batch; returns the loss."""
        first, second = views
        if self.step > 0:
            self.move_key_encoder()
        negatives = self.queue.clone()
        halves = [(first, second), (second, first)] if self.symmetric else [(first, second)]
        losses, keys = [], []
        for a, b in halves:
            q = F.normalize(self.predictor(self.query_encoder(a)), dim=1)
            with torch.no_grad():
                k = F.normalize(self.key_encoder(b), dim=1)
            others = k if self.in_batch_negatives else None
            losses.append(plain_info_nce(q, k, negatives, self.temperature, others))
            keys.insert(0, k)  # first the keys of the first view, then those of the second
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if len(self.queue):
            for key in torch.cat(keys):
                self.queue[self.pointer] = key
                self.pointer = (self.pointer + 1) % len(self.queue)
        self.step += 1
        return float(loss.detach())
