"""What all judges ask of features and labels."""

from __future__ import annotations

import torch
from torch import Tensor


def check_features(features: Tensor, labels: Tensor, name: str) -> None:
    """Check that there is one label for each row of features (N, D)."""
    if features.ndim != 2 or len(features) == 0:
        raise ValueError(f"{name}_features has shape {tuple(features.shape)}; it must be (N, D) with N >= 1")
    if len(labels) != len(features):
        raise ValueError(f"{name}_labels has {len(labels)} entries and {name}_features {len(features)} rows")


def class_numbers(labels: Tensor, classes: Tensor) -> Tensor:
    """The place of each label in ``classes``, which are sorted; -1 where it is not among them."""
    places = torch.searchsorted(classes, labels).clamp_max(len(classes) - 1)
    return torch.where(classes[places] == labels, places, -1)


def labelled(labels: Tensor) -> Tensor:
    """The rows that have a label, of labels (N,) or (N, classes)."""
    return (labels >= 0 if labels.ndim == 1 else (labels >= 0).all(1)).nonzero()[:, 0]
