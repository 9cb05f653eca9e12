"""A queue plugin: new keys replace random rows, so old keys fade out instead of leaving all at the same age.

MoCo(backbone, 512, queue="random")
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from moco_plugins import hookimpl


class RandomQueue(nn.Module):
    """K keys; each new key replaces a row drawn at random, by a draw that all ranks and a resumed run repeat."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.size, self.dim = size, dim
        self.register_buffer("keys", F.normalize(torch.randn(size, dim), dim=1))
        self.register_buffer("filled", torch.zeros((), dtype=torch.long))
        self.register_buffer("draws", torch.zeros((), dtype=torch.long))

    def negatives(self) -> torch.Tensor:
        return self.keys

    @torch.no_grad()
    def enqueue(self, keys: torch.Tensor) -> None:
        keys = F.normalize(keys.to(self.keys.dtype), dim=1)
        keys = keys[torch.isfinite(keys).all(1)][-self.size :]
        generator = torch.Generator().manual_seed(int(self.draws))
        rows = torch.randperm(self.size, generator=generator)[: len(keys)].to(self.keys.device)
        self.keys[rows] = keys
        self.filled.add_(len(keys)).clamp_(max=self.size)
        self.draws.add_(1)


@hookimpl
def moco_build_queue(name, size, dim):
    return RandomQueue(size, dim) if name == "random" else None
