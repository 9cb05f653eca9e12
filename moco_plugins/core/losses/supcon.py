"""Supervised contrastive learning (Khosla et al. 2020, arXiv:2004.11362), with a queue and for partly labelled data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..contrast import check_rows, class_sums, contrast, full_precision
from ..infonce import log1p_exp
from ..logsumexp import Keys, logsumexp


@full_precision
def supcon(
    query: Tensor,
    positive: Tensor,
    negatives: Keys | Sequence[Keys],
    temperature: float | Tensor,
    in_batch_negatives: bool = False,
    implementation: str = "auto",
    *,
    labels: Tensor,
    negative_labels: Tensor | Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Return the supervised contrastive loss, L_out of equation 2.

        L = mean_i( logsumexp([q_i·k_i, q_i·n_1, ...] / T) - mean over p in P_i of q_i·p / T )

    P_i is the query's own key and all keys of its label, in the queue and, with ``in_batch_negatives``, in the batch. Rows
    without a label (-1) have their own key as the only positive, as in UniMoCo (arXiv:2103.10773), and are positives of
    no other. The positives are needed only through the sums of their classes.

    Args:
        query, positive, negatives, temperature, in_batch_negatives, implementation: see :func:`moco_plugins.info_nce`.
        labels: (N) whole numbers, -1 where unknown.
        negative_labels: (K), one tensor for each set of negatives.

    Raises:
        ValueError: as info_nce, or labels of a wrong shape.
    """
    check_rows("labels", labels, query)
    of = contrast(query, positive, negatives, temperature, in_batch_negatives, implementation, None, negative_labels)
    wanted = torch.where(labels < 0, -2, labels)  # a row without a label finds none
    total, count = of.positive, torch.ones_like(of.positive[:, 0])  # N x D, N: its own key
    sets: list[tuple[Keys, Tensor | None]] = list(zip(of.banks, of.bank_ids, strict=True))
    if in_batch_negatives:
        sets.append((of.positive, torch.where(labels < 0, -1, labels)))
        total, count = total * (labels < 0)[:, None], count * (labels < 0)  # the batch holds it where there is a label
    for bank, own in sets:
        if not isinstance(bank, Tensor):
            sums, numbers = bank.sums(wanted)
        elif own is not None:
            sums, numbers = class_sums(bank, own, wanted)
        else:
            continue
        total, count = total + sums, count + numbers
    mean_logit = (of.query * (total / count[:, None])).sum(1, dtype=of.temperature.dtype) / of.temperature
    if in_batch_negatives:
        lse = logsumexp(of.query, [of.positive, *of.banks], of.temperature, implementation=implementation)
        return (lse - mean_logit).mean()
    own_logit = of.positive_logit
    # logsumexp with the own key = its logit + log(1 + exp(the others' - its logit))
    others = logsumexp(of.query, of.banks, of.temperature, implementation=implementation)
    return (log1p_exp(others - own_logit) + own_logit - mean_logit).mean()
