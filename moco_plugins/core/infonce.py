"""InfoNCE: the contrastive loss of MoCo (He et al. 2020, arXiv:1911.05722, equation 1).

    L = mean_i( logsumexp([q_i·k_i, q_i·n_1, ..., q_i·n_K] / T) - q_i·k_i / T )

The logsumexp over the negatives, and its gradient, are one call of a fused kernel: :mod:`moco_plugins.core.logsumexp`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .contrast import ContrastiveLoss, contrast, full_precision
from .logsumexp import Keys, logsumexp

__all__ = ["ContrastiveLoss", "info_nce"]


@full_precision
def info_nce(
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
    """Return the InfoNCE loss of queries against their positives and a set of negatives, averaged over the batch.

    Rows are expected L2-normalised; they are used as they are. With nothing learned yet, the loss is near
    ln(number of negatives + 1).

    Args:
        query: (N, D), carries the gradient.
        positive: (N, D), the key of each query.
        negatives: (K, D), K >= 0, or several such tensors, which are joined exactly without being copied together.
        temperature: T > 0; 0.07 in MoCo v1 (section 3.3), 0.2 in v2 (Chen et al. 2020, arXiv:2003.04297, table 1).
            A 0-dim tensor may carry a gradient.
        in_batch_negatives: the other N - 1 positives are negatives as well. False, as in the paper.
        implementation: "fused" (attention kernel, no (N, K) matrix), "dense" (the plain formula), or "auto": fused
            where a kernel runs and positives and negatives carry no gradient, dense elsewhere.
        ids: (N) whole numbers, one an image, -1 where unknown: negatives of the query's own image are left out.
        negative_ids: (K), one tensor for each set of negatives.

    Raises:
        ValueError: shapes do not match, T <= 0, or "fused" is asked for where it cannot run.
    """
    of = contrast(query, positive, negatives, temperature, in_batch_negatives, implementation, ids, negative_ids)
    positive_logit = of.positive_logit  # N
    if in_batch_negatives and ids is None:
        # The batch keys as one more bank hold each query's own positive too: it is then not added a second time.
        banks = [of.positive, *of.banks]
        return (logsumexp(of.query, banks, of.temperature, implementation=implementation) - positive_logit).mean()
    return log1p_exp(of.lse() - positive_logit).mean()


def log1p_exp(difference: Tensor) -> Tensor:
    """log(1 + exp(x)): minus the log of a positive's share, from lse(negatives) - positive, where neither end is lost."""
    return F.softplus(difference, threshold=25 if difference.dtype == torch.float32 else 40)
