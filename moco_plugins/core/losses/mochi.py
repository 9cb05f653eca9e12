"""MoCHi: hard negative mixing (Kalantidis et al. 2020, arXiv:2010.01028)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..contrast import Contrast, contrast, full_precision
from ..infonce import log1p_exp
from ..logsumexp import Keys

#: Logits of so many keys, and mixtures of so many numbers, are in memory at one time.
BLOCK_ROWS, BLOCK_NUMBERS = 16384, 1 << 20


@full_precision
def mochi(
    query: Tensor,
    positive: Tensor,
    negatives: Keys | Sequence[Keys],
    temperature: float | Tensor,
    in_batch_negatives: bool = False,
    implementation: str = "auto",
    *,
    hardest: int = 1024,
    mixed: int = 1024,
    with_query: int = 128,
    ids: Tensor | None = None,
    negative_ids: Tensor | Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Return InfoNCE with synthetic negatives beside the others, for each query its own (section 4).

        h  = normalise(a n_1 + (1 - a) n_2),  a in (0, 1)             n_1, n_2 drawn from the hardest negatives (equation 4)
        h' = normalise(b q   + (1 - b) n),    b in (0, 0.5)           (equation 5)

    They are constants, also where the query is mixed in. Without gradient, no (N, K) matrix and no copy of all mixtures.

    Args:
        query, positive, negatives, temperature, in_batch_negatives, implementation, ids, negative_ids: see
            :func:`moco_plugins.info_nce`.
        hardest: N, the negatives of largest logit to draw from; 1024. The three numbers are the paper's MoCHi (1024, 1024,
            128), one of the settings in its tables; of a small queue take less.
        mixed: s, mixtures of two of them; 1024.
        with_query: s', mixtures of one of them and the query; 128.

    Raises:
        ValueError: as info_nce; a number below 0 (hardest: 1); a queue that is shared out among ranks.
    """
    for name, value in (("hardest", hardest - 1), ("mixed", mixed), ("with_query", with_query)):
        if value < 0:
            raise ValueError(f"{name}={value + (name == 'hardest')} must be at least {int(name == 'hardest')}")
    of = contrast(query, positive, negatives, temperature, in_batch_negatives, implementation, ids, negative_ids)
    lse = of.lse()
    banks, named = of.others()
    if any(not isinstance(bank, Tensor) for bank in banks):
        raise ValueError("loss='mochi' mixes rows of the queue and needs it whole on each rank: use gather='whole'")
    if banks and mixed + with_query:
        rows = torch.cat([bank.detach() for bank in banks if isinstance(bank, Tensor)]) if len(banks) > 1 else banks[0]
        chosen, usable = _hardest(of, banks, named, min(hardest, rows.shape[0]))
        draw, share = _draw(chosen, usable, mixed, with_query, of.query)
        logits = _MixtureLogits.apply(of.query, rows, draw, share, mixed) / of.temperature  # N x mixtures
        lse = torch.logaddexp(lse, torch.where(usable > 0, logits.logsumexp(1), -torch.inf))
    return log1p_exp(lse - of.positive_logit).mean()


@torch.no_grad()
def _hardest(of: Contrast, banks: list[Any], named: dict[str, Any], count: int) -> tuple[Tensor, Tensor]:
    """Return the rows (N, count) of the hardest negatives in order, and how many of them are real, (N)."""
    n = len(of.query)
    best = of.query.new_full((n, 0), 0.0)
    rows = torch.zeros(n, 0, dtype=torch.long, device=best.device)
    start = 0
    for bank, numbers in zip(banks, named["key_ids"], strict=True):
        for first in range(0, len(bank), BLOCK_ROWS):
            block = bank[first : first + BLOCK_ROWS]
            logits = of.query @ block.T  # N x block
            if named["query_ids"] is not None and numbers is not None:
                own = named["query_ids"][:, None] == numbers[None, first : first + BLOCK_ROWS]
                logits = logits.masked_fill_(own, -torch.inf)
            found, where = logits.topk(min(count, len(block)), dim=1)
            best, rows = torch.cat([best, found], 1), torch.cat([rows, where + start + first], 1)
            if best.shape[1] > count:
                best, kept = best.topk(count, dim=1)
                rows = rows.gather(1, kept)
        start += len(bank)
    best, order = best.sort(dim=1, descending=True)
    return rows.gather(1, order), (best > -torch.inf).sum(1)


def _draw(chosen: Tensor, usable: Tensor, mixed: int, with_query: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Draw rows (N, 2 mixed + with_query) among those usable, and shares (N, mixed + with_query)."""
    n = len(chosen)
    place = torch.rand(n, 2 * mixed + with_query, device=like.device) * usable[:, None]
    draw = chosen.gather(1, place.long().clamp_max(chosen.shape[1] - 1))
    share = torch.rand(n, mixed + with_query, device=like.device, dtype=like.dtype)
    share[:, mixed:] *= 0.5
    return draw, share


class _MixtureLogits(torch.autograd.Function):
    """q·h of each query's own mixtures, (N, M), a few queries at a time; the mixtures are made once more for the gradient."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, rows: Tensor, draw: Tensor, share: Tensor, mixed: int) -> Tensor:
        ctx.save_for_backward(query, rows, draw, share)
        ctx.mixed = mixed
        parts = [
            torch.bmm(mixtures, query[part, :, None])[:, :, 0]
            for part, mixtures in _mixtures(query, rows, draw, share, mixed)
        ]
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, rows, draw, share = ctx.saved_tensors
        parts = [
            torch.bmm(grad[part, None], mixtures)[:, 0]
            for part, mixtures in _mixtures(query, rows, draw, share, ctx.mixed)
        ]
        return torch.cat(parts), None, None, None, None


def _mixtures(query: Tensor, rows: Tensor, draw: Tensor, share: Tensor, mixed: int) -> Any:
    few = max(1, BLOCK_NUMBERS // (share.shape[1] * query.shape[1]))
    for start in range(0, len(query), few):
        part = slice(start, start + few)
        hard = rows[draw[part]]  # few x (2 mixed + with_query) x D
        first = torch.cat([hard[:, :mixed], query[part, None].expand(-1, share.shape[1] - mixed, -1)], 1)
        yield part, torch.nn.functional.normalize(torch.lerp(hard[:, mixed:], first, share[part, :, None]), dim=2)
