"""Besides accuracy: what a classifier is worth where classes are unequal, or where an image has several labels."""

from __future__ import annotations

import torch
from torch import Tensor


def confusion(predicted: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return counts (classes, classes): row true class, column predicted one. Labels of -1 are left out."""
    known = labels >= 0
    return torch.bincount(labels[known] * classes + predicted[known], minlength=classes**2).view(classes, classes)


def balanced_accuracy(counts: Tensor) -> float:
    """The mean over classes of the part that is recognised, from a :func:`confusion`; classes without images do not count."""
    of_class = counts.sum(1)
    there = of_class > 0
    return float((counts.diagonal()[there] / of_class[there]).mean())


def macro_auroc(scores: Tensor, labels: Tensor) -> float:
    """The mean over classes of the area under the ROC curve, each class against the rest.

    Args:
        scores: (M, classes), probabilities or logits.
        labels: (M,), or (M, classes) of 0 and 1.

    Raises:
        ValueError: there are fewer than two classes among the labels, or of several none with images in it and not in it.
    """
    from sklearn.metrics import roc_auc_score

    areas = []
    for number in range(scores.shape[1]):
        own = labels == number if labels.ndim == 1 else labels[:, number] > 0
        if bool(own.any()) and not bool(own.all()):
            areas.append(float(roc_auc_score(own.numpy(), scores[:, number].numpy())))
    if not areas:
        raise ValueError(f"labels has {len(torch.unique(labels))} class; an area under the ROC curve needs two")
    return sum(areas) / len(areas)


def mean_average_precision(scores: Tensor, labels: Tensor) -> float:
    """The mean over classes of the average precision, for images with several labels.

    Args:
        scores: (M, classes).
        labels: (M, classes), 0 or 1; classes without an image do not count.

    Raises:
        ValueError: shapes differ, or no class has an image.
    """
    found = [value for value in average_precisions(scores, labels) if value is not None]
    if not found:
        raise ValueError("labels has no class with an image; a mean average precision needs one")
    return sum(found) / len(found)


def average_precisions(scores: Tensor, labels: Tensor) -> list[float | None]:
    """The average precision of each class; None where it has no image. Arguments as for :func:`mean_average_precision`."""
    from sklearn.metrics import average_precision_score

    if scores.shape != labels.shape:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} and scores {tuple(scores.shape)}; both are (M, classes)"
        )
    return [
        float(average_precision_score(own.numpy(), told.numpy())) if bool(own.any()) else None
        for own, told in zip(labels.T, scores.T, strict=True)
    ]
