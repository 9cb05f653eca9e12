"""Decoupled contrastive learning (Yeh et al. 2022, arXiv:2110.06848)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..contrast import contrast, full_precision
from ..logsumexp import Keys


@full_precision
def decoupled(
    query: Tensor,
    positive: Tensor,
    negatives: Keys | Sequence[Keys],
    temperature: float | Tensor,
    in_batch_negatives: bool = False,
    implementation: str = "auto",
    *,
    ids: Tensor | None = None,
    negative_ids: Tensor | Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Return InfoNCE without the positive in the denominator (section 3.2, equation 6).

        L = mean_i( logsumexp_j(q_i·n_j / T) - q_i·k_i / T )

    So an easy positive does not shrink the gradient of its negatives. The arguments are those of
    :func:`moco_plugins.info_nce`; there must be at least one negative.

    Raises:
        ValueError: as info_nce, and where there are no negatives at all.
    """
    of = contrast(query, positive, negatives, temperature, in_batch_negatives, implementation, ids, negative_ids)
    if not of.banks and not (in_batch_negatives and len(query) > 1):
        raise ValueError("negatives has no row, and without one the decoupled loss has no denominator; use info_nce")
    return (of.lse() - of.positive_logit).mean()
