"""An encoder: a backbone and its projection head, images -> (N, projection_dim)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Encoder(nn.Module):
    """Backbone, then projection head; the output is not normalised.

    Args:
        backbone: images -> (N, feature_dim).
        projector: (N, feature_dim) -> (N, projection_dim).
        feature_dim: checked against what the backbone returns.
    """

    def __init__(self, backbone: nn.Module, projector: nn.Module, feature_dim: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = projector
        self.feature_dim = feature_dim

    def features(self, images: Tensor) -> Tensor:
        """Return the backbone's features (N, feature_dim)."""
        features: Any = self.backbone(images)
        expected = (images.shape[0], self.feature_dim)
        if not isinstance(features, Tensor):
            raise TypeError(
                f"backbone returned a {type(features).__name__}; it must return one tensor of shape {expected}: "
                "wrap it in a module that picks the features"
            )
        if features.shape != expected:
            if features.ndim != 2:
                cure = "pool and flatten its output"
            elif features.shape[0] != images.shape[0]:
                cure = "it must return one row for each image"
            else:
                cure = f"pass feature_dim={features.shape[1]}"
            raise ValueError(
                f"backbone returned shape {tuple(features.shape)} and feature_dim={self.feature_dim} asks for {expected}; "
                f"{cure}"
            )
        return features

    def forward(self, images: Tensor) -> Tensor:
        """Return the projections (N, projection_dim)."""
        return self.projector(self.features(images))
