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
        """Take a step; return loss and accuracy on the batch as it was before, both 0-dim.

        Args:
            features: (N, D).
            targets: (N,), whole numbers; rows below 0 have no label and take no part. Without any labelled row nothing
                changes, and both results are NaN.
        """
        with torch.autocast(features.device.type, enabled=False):
            features = features.detach().to(self.mean.dtype)
            labelled = (targets >= 0).to(features.dtype)  # N
            rows = labelled[:, None]
            count = _sum_of_ranks(labelled.sum())
            some, per_row = (count > 0).to(features.dtype), 1 / count.clamp_min(1)
            weight = some * (1 / self.steps.add_(some).clamp_min(1)).clamp_min(0.1)  # at first the mean of all batches
            batch_mean = _sum_of_ranks((rows * features).sum(0)) * per_row
            self.mean.lerp_(batch_mean, weight)
            self.variance.lerp_(_sum_of_ranks((rows * (features - batch_mean).square()).sum(0)) * per_row, weight)
            logits = self(features)
            error = rows * (logits.softmax(1) - F.one_hot(targets.clamp_min(0), self.num_classes))  # N x C
            standard = (features - self.mean) * (self.variance + 1e-5).rsqrt()
            gradient = torch.cat([error.T @ standard, error.sum(0)[:, None]], 1)  # C x (D + 1)
            self.velocity.mul_(1 - 0.1 * some).add_(_sum_of_ranks(gradient) * per_row)
            self.weight.sub_(self.lr * some * self.velocity[:, :-1])
            self.bias.sub_(self.lr * some * self.velocity[:, -1])
            losses = F.cross_entropy(logits, targets.clamp_min(0), reduction="none")
            right = (logits.argmax(1) == targets).to(features.dtype)
            own = labelled.sum()
            return (labelled * losses).sum() / own, right.sum() / own


def _sum_of_ranks(tensor: Tensor) -> Tensor:
    if distributed.world_size() > 1:
        torch.distributed.all_reduce(tensor)
    return tensor


class FeatureMemory:
    """Features and their labels, for kNN. Rows without a label (below 0) are let go.

    Args:
        feature_dim: D.
        size: how many of the newest labelled rows are kept; None: all.
    """

    def __init__(self, feature_dim: int, size: int | None = None) -> None:
        self.feature_dim, self.size = feature_dim, size
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.features: list[Tensor] = []
        self.targets: list[Tensor] = []
        self._rows, self._looked_at = 0, 0

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Take features (N, D) and labels (N,)."""
        self.features.append(features.detach().float().clone())
        self.targets.append(targets.detach())
        self._rows += len(targets)
        # Which rows have labels is looked at once in so many rows, for that waits for the device.
        if self.size is not None and self._rows >= self._looked_at + self.size:
            self._shorten()
            self._looked_at = self._rows

    def _shorten(self) -> None:
        features, targets = torch.cat(self.features), torch.cat(self.targets)
        kept = (targets >= 0).nonzero()[:, 0]
        kept = kept if self.size is None else kept[-self.size :]
        self.features, self.targets, self._rows = [features[kept]], [targets[kept]], len(kept)

    def collect(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return features (n, D) and labels (n,) of all ranks on the CPU. All ranks must call it, those without rows too."""
        self.features.append(torch.zeros(0, self.feature_dim, device=device))
        self.targets.append(torch.zeros(0, dtype=torch.long, device=device))
        self._shorten()
        features, targets = self.features[0], self.targets[0].long()
        features, targets = (torch.cat(distributed.gather_rows(part)).cpu() for part in (features, targets))
        return features, targets
