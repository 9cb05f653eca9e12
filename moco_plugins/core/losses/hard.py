"""Contrastive learning with hard negatives (Robinson et al. 2021, arXiv:2010.04592)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..contrast import contrast, full_precision
from ..logsumexp import Keys
from .debiased import check_prior, corrected


@full_precision
def hard(
    query: Tensor,
    positive: Tensor,
    negatives: Keys | Sequence[Keys],
    temperature: float | Tensor,
    in_batch_negatives: bool = False,
    implementation: str = "auto",
    *,
    beta: float = 1.0,
    class_prior: float = 0.1,
    ids: Tensor | None = None,
    negative_ids: Tensor | Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Return the debiased loss with the negatives weighted by how near they are (section 3, equations 4 and 5).

        w_ij = exp(b q_i·n_j / T) / mean_l exp(b q_i·n_l / T)
        g_i = max( (mean_j w_ij exp(q_i·n_j / T) - c exp(q_i·k_i / T)) / (1 - c), exp(-1 / T) )
        L = mean_i( -log( exp(q_i·k_i / T) / (exp(q_i·k_i / T) + K g_i) ) )

    The weighted mean is a quotient of two sums, at the temperatures T / (1 + b) and T / b.

    Args:
        query, positive, negatives, temperature, in_batch_negatives, implementation, ids, negative_ids: see
            :func:`moco_plugins.info_nce`.
        beta: b >= 0, the concentration on hard negatives; 1.0, the authors' for CIFAR-10. 0 is the debiased loss.
        class_prior: c, the probability that a negative is of the query's class; 0.1, the authors' for ten classes.

    Raises:
        ValueError: as info_nce, b < 0, and c outside [0, 1).
    """
    check_prior(class_prior)
    if not beta >= 0:
        raise ValueError(f"beta={beta!r} must be at least 0: 0 weights all negatives alike, 1 is the authors'")
    of = contrast(query, positive, negatives, temperature, in_batch_negatives, implementation, ids, negative_ids)
    count = of.count()
    weights = of.lse(of.temperature / beta) if beta else count.log()
    return corrected(of, of.lse(of.temperature / (1 + beta)) - weights, count, class_prior)
