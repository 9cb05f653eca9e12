"""What all judges ask of features and labels."""

from __future__ import annotations

from torch import Tensor


def check_features(features: Tensor, labels: Tensor, name: str) -> None:
    """Check that there is one label for each row of features (N, D)."""
    if features.ndim != 2 or len(features) == 0:
        raise ValueError(f"{name}_features has shape {tuple(features.shape)}; it must be (N, D) with N >= 1")
    if len(labels) != len(features):
        raise ValueError(f"{name}_labels has {len(labels)} entries and {name}_features {len(features)} rows")
