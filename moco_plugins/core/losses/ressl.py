"""ReSSL: relational self-supervised learning (Zheng et al. 2021, arXiv:2107.09282)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..contrast import contrast, full_precision
from ..logsumexp import Keys


@full_precision
def ressl(
    query: Tensor,
    positive: Tensor,
    negatives: Keys | Sequence[Keys],
    temperature: float | Tensor,
    in_batch_negatives: bool = False,
    implementation: str = "auto",
    *,
    teacher_temperature: float = 0.04,
    ids: Tensor | None = None,
    negative_ids: Tensor | Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Return the cross-entropy between the key's and the query's relations to the queue (section 3.2, equations 4 to 6).

        p_i = softmax_j(k_i·n_j / T')        L = mean_i( logsumexp_j(q_i·n_j / T) - sum_j p_ij q_i·n_j / T )

    The soft targets are needed only through their mean ``sum_j p_ij n_j``. The key is no positive here: it says how near
    the query should be to each key of the queue. There must be at least one.

    Args:
        query, positive, negatives, temperature, in_batch_negatives, implementation, ids, negative_ids: see
            :func:`moco_plugins.info_nce`; T is 0.1 in the paper.
        teacher_temperature: T', sharper than T; 0.04 (section 4).

    Raises:
        ValueError: as info_nce, T' <= 0, and where there are no negatives at all.
    """
    if not teacher_temperature > 0:
        raise ValueError(f"teacher_temperature={teacher_temperature!r} must be greater than 0 (0.04 in the paper)")
    of = contrast(query, positive, negatives, temperature, in_batch_negatives, implementation, ids, negative_ids)
    if not of.banks and not (in_batch_negatives and len(query) > 1):
        raise ValueError("negatives has no row, and relations need some: give the method a queue")
    target = of.mean_for(of.positive, teacher_temperature)  # N x D
    return (of.lse() - (of.query * target).sum(1, dtype=of.temperature.dtype) / of.temperature).mean()
