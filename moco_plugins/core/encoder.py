"""An encoder: a backbone and its projection head, images -> (N, projection_dim)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .nested import View, rows

#: What torchvision and timm call the classifier at the end of a model.
_CLASSIFIERS = ("fc", "classifier", "head", "heads", "head_dist", "last_linear")


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

    def features(self, images: View) -> Tensor:
        """Return the backbone's features (N, feature_dim)."""
        features: Any = self.backbone(images)
        n = rows(images)
        expected = (n, self.feature_dim)
        if not isinstance(features, Tensor):
            raise TypeError(
                f"backbone returned a {type(features).__name__}; it must return one tensor of shape {expected}: "
                "wrap it in a module that picks the features"
            )
        if features.shape != expected:
            if features.ndim != 2:
                cure = "pool and flatten its output"
            elif features.shape[0] != n:
                cure = "it must return one row for each image"
            else:
                cure = _classifier(self.backbone, features.shape[1]) or f"pass feature_dim={features.shape[1]}"
            raise ValueError(
                f"backbone returned shape {tuple(features.shape)} and feature_dim={self.feature_dim} asks for {expected}; "
                f"{cure}"
            )
        return features

    def forward(self, images: View) -> Tensor:
        """Return the projections (N, projection_dim)."""
        return self.projector(self.features(images))


def _classifier(backbone: nn.Module, width: int) -> str | None:
    """The cure where the backbone ends in a classifier, whose logits are no features; None where it does not."""
    for name, layer in backbone.named_modules():
        if isinstance(layer, nn.Linear) and layer.out_features == width and name.partition(".")[0] in _CLASSIFIERS:
            return (
                f"it ends in a classifier, {name}: its {width} outputs are logits. Take it away, backbone."
                f"{name} = torch.nn.Identity() and feature_dim={layer.in_features}, or build the backbone without one: "
                "moco_plugins.backbones.build_backbone(name)"
            )
    return None
