"""What features look like: how near views of an image lie, how evenly images spread, how many directions are in use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.no_grad()
def alignment(first: Tensor, second: Tensor) -> float:
    """Mean squared distance of the normalised features of two views (Wang & Isola 2020, arXiv:2005.10242)."""
    return float((F.normalize(first, dim=1) - F.normalize(second, dim=1)).pow(2).sum(1).mean())


@torch.no_grad()
def uniformity(features: Tensor, most: int = 2000) -> float:
    """ln of the mean of exp(-2 d²) over pairs of normalised features (Wang & Isola 2020); 0: all are one point."""
    points = F.normalize(features[:most], dim=1)
    if len(points) < 2:
        raise ValueError(f"features has {len(points)} rows; uniformity needs at least two")
    return float(torch.pdist(points).pow(2).mul(-2).exp().mean().log())


@torch.no_grad()
def effective_rank(features: Tensor) -> float:
    """exp of the entropy of the normalised singular values (Roy & Vetterli 2007): how many directions are in use."""
    centred = (features - features.mean(0)).double()
    values = torch.linalg.eigvalsh(centred.T @ centred).clamp_min(0).sqrt()
    if not float(values.sum()) > 0:
        return 0.0
    share = values / values.sum()
    return float(torch.special.entr(share).sum().exp())
