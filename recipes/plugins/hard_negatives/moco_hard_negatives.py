"""A loss plugin: InfoNCE with mixed hard negatives (MoCHi, Kalantidis et al. 2020, arXiv:2010.01028, section 4.1).

MoCo(backbone, 512, loss="hard_negatives", loss_options=dict(hardest=256, mixed=64))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moco_plugins import hookimpl


class HardNegativeMixing:
    """InfoNCE whose negatives are joined, for each query, by ``mixed`` mixtures of its ``hardest`` negatives."""

    def __init__(self, hardest: int = 256, mixed: int = 64) -> None:
        self.hardest, self.mixed = hardest, mixed

    def __call__(self, query, positive, negatives, temperature, in_batch_negatives=False):
        negatives = negatives if isinstance(negatives, torch.Tensor) else torch.cat(list(negatives))  # K x D
        positive_logit = (query * positive).sum(1, keepdim=True)  # N x 1
        logits = query @ negatives.T  # N x K
        n = len(query)
        with torch.no_grad():
            hard = negatives[logits.topk(min(self.hardest, len(negatives)), dim=1).indices]  # N x hardest x D
            rows = torch.arange(n, device=query.device)[:, None]
            a, b = (hard[rows, torch.randint(hard.shape[1], (n, self.mixed), device=query.device)] for _ in range(2))
            share = torch.rand(n, self.mixed, 1, device=query.device)
            mixtures = F.normalize(share * a + (1 - share) * b, dim=2)  # N x mixed x D
        parts = [positive_logit, logits, torch.einsum("nd,nmd->nm", query, mixtures)]
        if in_batch_negatives:
            batch = query @ positive.T
            own = torch.eye(n, dtype=torch.bool, device=query.device)
            parts.append(batch.masked_fill(own, -torch.inf))
        return (torch.cat(parts, dim=1) / temperature).logsumexp(1).mean() - (positive_logit / temperature).mean()


@hookimpl
def moco_build_loss(name, options):
    return HardNegativeMixing(**options) if name == "hard_negatives" else None
