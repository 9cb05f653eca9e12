"""How good the features are, while training goes on, without touching the training: a linear probe and a memory for kNN."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco_plugins.steps import distributed


class OnlineLinearProbe(nn.Module):
    """Softmax regression on standardised features, trained by itself.

    It has no parameters and no gradient: it is in no optimiser, in no gradient norm that is clipped, and not waited for by
    DDP. Its weights start at zero, so it draws no random numbers either. Under several processes it takes the mean
    gradient of all.

    Args:
        feature_dim: D.
        num_classes: C.
        lr: step size of plain gradient descent with momentum 0.9.
    """

    weight: Tensor
    bias: Tensor
    velocity: Tensor
    mean: Tensor
    variance: Tensor
    steps: Tensor

    def __init__(self, feature_dim: int, num_classes: int, lr: float = 0.1) -> None:
        super().__init__()
        self.num_classes, self.lr = num_classes, lr
        self.register_buffer("weight", torch.zeros(num_classes, feature_dim))
        self.register_buffer("bias", torch.zeros(num_classes))
        self.register_buffer("velocity", torch.zeros(num_classes, feature_dim + 1))
        self.register_buffer("mean", torch.zeros(feature_dim))
        self.register_buffer("variance", torch.ones(feature_dim))
        self.register_buffer("steps", torch.zeros(()))

    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        """Return the logits (N, C) of features (N, D)."""
        standard = (features.to(self.mean.dtype) - self.mean) * (self.variance + 1e-5).rsqrt()
        return standard @ self.weight.T + self.bias

    @torch.no_grad()
    def learn(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Take a step; return loss and accuracy on the batch as it was before, both 0-dim."""
        with torch.autocast(features.device.type, enabled=False):
            features = features.detach().to(self.mean.dtype)
            weight = (1 / self.steps.add_(1)).clamp_min(0.1)  # at first the mean of all batches
            batch_mean = _mean_of_ranks(features.mean(0))
            self.mean.lerp_(batch_mean, weight)
            self.variance.lerp_(_mean_of_ranks((features - batch_mean).square().mean(0)), weight)
            logits = self(features)
            error = logits.softmax(1) - F.one_hot(targets, self.num_classes)  # N x C
            standard = (features - self.mean) * (self.variance + 1e-5).rsqrt()
            gradient = torch.cat([error.T @ standard, error.sum(0)[:, None]], 1) / features.shape[0]  # C x (D + 1)
            self.velocity.mul_(0.9).add_(_mean_of_ranks(gradient))
            self.weight.sub_(self.lr * self.velocity[:, :-1])
            self.bias.sub_(self.lr * self.velocity[:, -1])
            return F.cross_entropy(logits, targets), (logits.argmax(1) == targets).float().mean()


def _mean_of_ranks(tensor: Tensor) -> Tensor:
    if distributed.world_size() == 1:
        return tensor
    torch.distributed.all_reduce(tensor)
    return tensor / distributed.world_size()


class FeatureMemory:
    """Features and their labels, for kNN.

    Args:
        size: how many of the newest rows are kept; None: all.
    """

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.features: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.rows = 0

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Take features (N, D) and labels (N,)."""
        self.features.append(features.detach().float().clone())
        self.targets.append(targets.detach())
        self.rows += len(targets)
        while self.size is not None and self.rows - len(self.targets[0]) >= self.size:
            self.rows -= len(self.targets[0])
            del self.features[0], self.targets[0]

    def collect(self) -> tuple[Tensor, Tensor] | None:
        """Return features and labels of all ranks on the CPU, or None where there are none. All ranks must call it."""
        if not self.rows:
            return None
        features, targets = (torch.cat(distributed.gather_rows(torch.cat(p))) for p in (self.features, self.targets))
        return features.cpu(), targets.cpu()
