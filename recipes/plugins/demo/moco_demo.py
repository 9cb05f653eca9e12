"""A plugin that adds a method, a data set and a section of the report; all three then work by name.

pip install ./recipes/plugins/demo
moco-plugins bench --methods moco-v2,spectral --data mnist-parity
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from moco_plugins import hookimpl
from moco_plugins.plugins import dataset_factory


class Spectral(nn.Module):
    """The spectral contrastive loss (HaoChen et al. 2021, arXiv:2106.04156, equation 6)."""

    def __init__(self, backbone: nn.Module, feature_dim: int, projection_dim: int = 64, radius: float = 3.0) -> None:
        super().__init__()
        self.backbone, self.feature_dim, self.total_steps, self.radius = backbone, feature_dim, None, radius
        self.head = nn.Sequential(
            nn.Linear(feature_dim, feature_dim),
            nn.BatchNorm1d(feature_dim),
            nn.ReLU(),
            nn.Linear(feature_dim, projection_dim),
        )
        self.last_loss = torch.tensor(float("nan"))

    def forward(self, views):
        a, b = (self.radius**0.5 * F.normalize(self.head(self.backbone(view)), dim=1) for view in views)  # N x D
        others = ~torch.eye(len(a), dtype=torch.bool, device=a.device)
        loss = -2 * (a * b).sum(1).mean() + (a @ b.T)[others].square().mean()
        self.last_loss = loss.detach()
        return loss

    def embed(self, images):
        return self.backbone(images)

    def metrics(self):
        return {"loss": float(self.last_loss)}


def mnist_parity(root):
    """The embedded digits, labelled even or odd."""
    parts = dataset_factory("mnist5k")(root)
    for part in parts:
        part.labels = part.labels % 2
        part.classes = ["even", "odd"]
    return parts


@hookimpl
def moco_methods():
    return {"spectral": Spectral}


@hookimpl
def moco_datasets():
    return {"mnist-parity": mnist_parity}


@hookimpl
def moco_report_sections(results):
    names = ", ".join(sorted({run["method"] for run in results["runs"]}))
    return [("From the demo plugin", f"<p>It has seen the runs of: {names}.</p>")]
