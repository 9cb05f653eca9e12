"""Debiased contrastive learning (Chuang et al. 2020, arXiv:2007.00224)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..contrast import Contrast, contrast, full_precision
from ..infonce import log1p_exp
from ..logsumexp import Keys


@full_precision
def debiased(
    query: Tensor,
    positive: Tensor,
    negatives: Keys | Sequence[Keys],
    temperature: float | Tensor,
    in_batch_negatives: bool = False,
    implementation: str = "auto",
    *,
    class_prior: float = 0.1,
    ids: Tensor | None = None,
    negative_ids: Tensor | Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Return InfoNCE with the negatives corrected for those that are of the query's own class (equations 7 and 8).

        g_i = max( (mean_j exp(q_i·n_j / T) - c exp(q_i·k_i / T)) / (1 - c), exp(-1 / T) )
        L = mean_i( -log( exp(q_i·k_i / T) / (exp(q_i·k_i / T) + K g_i) ) )

    Args:
        query, positive, negatives, temperature, in_batch_negatives, implementation, ids, negative_ids: see
            :func:`moco_plugins.info_nce`.
        class_prior: c, the probability that a negative is of the query's class; 0.1, the authors' for ten classes.

    Raises:
        ValueError: as info_nce, and c outside [0, 1).
    """
    check_prior(class_prior)
    of = contrast(query, positive, negatives, temperature, in_batch_negatives, implementation, ids, negative_ids)
    count = of.count()
    return corrected(of, of.lse() - count.log(), count, class_prior)


def check_prior(class_prior: float) -> None:
    """Raise where c is no probability below 1."""
    if not 0 <= class_prior < 1:
        raise ValueError(
            f"class_prior={class_prior!r} must lie in [0, 1): the share of negatives of the query's own class"
        )


def corrected(of: Contrast, log_mean: Tensor, count: Tensor, class_prior: float) -> Tensor:
    """Return the loss from the log of the negatives' mean exp(q·n / T), (N), and their number, (N)."""
    positive = of.positive_logit
    log_g = log_mean
    if class_prior:
        gap = positive + torch.log(log_mean.new_tensor(class_prior)) - log_mean  # log of what is taken off / the mean
        above = gap < 0
        kept = torch.log(-torch.expm1(torch.where(above, gap, -1.0)))
        log_g = torch.where(above, log_mean + kept, -torch.inf) - torch.log1p(log_mean.new_tensor(-class_prior))
    log_g = torch.maximum(log_g, -1 / of.temperature)
    log_sum = torch.where(count > 0, log_g + count.clamp_min(1).log(), -torch.inf)
    return log1p_exp(log_sum - positive).mean()
