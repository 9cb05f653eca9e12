"""The losses as their papers write them, with the whole (N, K) matrix: what ours are timed against."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.infonce import info_nce
from ..core.key_queue import KeyQueue
from ..hooks import manager as plugins

#: Images of the data set whose ids are in the queue: each is there about 16 times at K = 65536.
IMAGES = 4000
#: Options under which both do the same.
OPTIONS = {"mochi": {"hardest": 256, "mixed": 64, "with_query": 0}}


def _cross_entropy(positive: Tensor, logits: Tensor) -> Tensor:
    return F.cross_entropy(torch.cat([positive, logits], 1), torch.zeros(len(positive), dtype=torch.long))


def _corrected(positive: Tensor, logits: Tensor, t: float, beta: float) -> Tensor:
    negative, own, c = logits.exp(), positive[:, 0].exp(), 0.1
    weights = negative**beta
    mean = (weights * negative).sum(1) / weights.sum(1)
    g = ((mean - c * own) / (1 - c)).clamp_min(torch.tensor(-1 / t).exp())
    return -torch.log(own / (own + logits.shape[1] * g)).mean()


def _mochi(q: Tensor, positive: Tensor, logits: Tensor, bank: Tensor, t: float) -> Tensor:
    n, mixed = len(q), 64
    with torch.no_grad():
        hard = bank[logits.topk(256, dim=1).indices]  # N x hardest x D
        rows = torch.arange(n)[:, None]
        a, b = (hard[rows, torch.randint(256, (n, mixed))] for _ in range(2))
        mixtures = F.normalize(torch.lerp(a, b, torch.rand(n, mixed, 1)), dim=2)
    return _cross_entropy(positive, torch.cat([logits, torch.einsum("nd,nmd->nm", q, mixtures) / t], 1))


def plain(name: str, q: Tensor, k: Tensor, bank: Tensor, t: float, labels: Tensor, known: Tensor) -> Tensor:
    """The loss called ``name`` of queries (N, D) with keys (N, D) against a bank (K, D); ``known`` are the bank's labels."""
    positive, logits = (q * k).sum(1, keepdim=True) / t, q @ bank.T / t
    if name == "decoupled":
        return (logits.logsumexp(1) - positive[:, 0]).mean()
    if name in ("debiased", "hard"):
        return _corrected(positive, logits, t, float(name == "hard"))
    if name == "mochi":
        return _mochi(q, positive, logits, bank, t)
    if name == "ressl":
        return -((k @ bank.T / 0.04).softmax(1) * logits.log_softmax(1)).sum(1).mean()
    if name == "supcon":
        log_p = torch.cat([positive, logits], 1).log_softmax(1)
        own = torch.cat([torch.ones(len(q), 1, dtype=torch.bool), labels[:, None] == known], 1)
        return -((log_p * own).sum(1) / own.sum(1)).mean()
    return _cross_entropy(positive, logits)


#: The losses besides info_nce.
LOSSES = ("decoupled", "debiased", "hard", "mochi", "ressl", "supcon")


def loss_steps(name: str, n: int, size: int, dim: int, t: float) -> dict[str, Callable[[], object]]:
    """Forward and backward of one loss: ours and the plain formula."""
    bank = KeyQueue(size, dim).negatives()
    query = F.normalize(torch.randn(n, dim), dim=1).requires_grad_()
    key = F.normalize(torch.randn(n, dim), dim=1)
    labels, known = torch.randint(10, (n,)), torch.randint(10, (size,))
    loss: Callable[..., Tensor] = plugins.build_loss(name, OPTIONS.get(name, {}))
    named = {"labels": labels, "negative_labels": known} if name == "supcon" else {}
    return {
        "moco-plugins": lambda: loss(query, key, bank, t, **named).backward(),
        "plain formula": lambda: plain(name, query, key, bank, t, labels, known).backward(),
    }


def masked_steps(n: int, size: int, dim: int, t: float) -> dict[str, Callable[[], object]]:
    """InfoNCE without the keys of the query's own image, and with them."""
    bank = KeyQueue(size, dim).negatives()
    query = F.normalize(torch.randn(n, dim), dim=1).requires_grad_()
    key = F.normalize(torch.randn(n, dim), dim=1)
    ids, of_keys = torch.randperm(IMAGES)[:n], torch.arange(size) % IMAGES
    return {
        "moco-plugins": lambda: info_nce(query, key, bank, t, ids=ids, negative_ids=of_keys).backward(),
        "without a mask": lambda: info_nce(query, key, bank, t).backward(),
    }
