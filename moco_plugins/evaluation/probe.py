"""A linear classifier on frozen features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.splits import stratified_split
from .checks import check_features, class_numbers
from .logistic import LogisticRegression

#: Inverse regularisation strengths that the linear probe chooses from.
PROBE_C = (0.1, 1.0, 10.0, 100.0)


class Probe(NamedTuple):
    """What a linear probe says of test images."""

    logits: Tensor  #: (M, classes)
    labels: Tensor  #: (M,), the column of ``logits`` that is right; -1: a class that the training part has not
    classes: Tensor  #: (classes,), the label that each column stands for
    strength: float  #: the C that was chosen

    @property
    def accuracy(self) -> float:
        """The part of the test images whose largest logit is the right one."""
        return float((self.logits.argmax(1) == self.labels).float().mean())


def linear_probe(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    strengths: Sequence[float] = PROBE_C,
    fraction: float = 1.0,
    seed: int = 0,
    max_iter: int = 300,
) -> tuple[float, float]:
    """Return (accuracy, C) of :func:`probe`, whose arguments it takes."""
    found = probe(
        train_features, train_labels, test_features, test_labels, strengths, fraction, seed=seed, max_iter=max_iter
    )
    return found.accuracy, found.strength


def probe(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    strengths: Sequence[float] = PROBE_C,
    fraction: float = 1.0,
    seed: int = 0,
    max_iter: int = 300,
) -> Probe:
    """Fit multinomial logistic regression on frozen features, and return what it says of the test images.

    Features are standardised with the mean and deviation of the training part. C is the one that is best on a
    validation part, a fifth of the training images; the final fit uses all of them.

    Args:
        train_features: (N, D).
        train_labels: (N,), any whole numbers from 0.
        test_features: (M, D).
        test_labels: (M,).
        strengths: the C to choose from.
        fraction: use only this fraction of the training labels, the same of each class and at least two of each.
        seed: decides the validation part and the labels that are used.
        max_iter: iterations of L-BFGS; a few dozen do.

    Raises:
        ValueError: fewer than two classes, or images without label.
    """
    check_features(train_features, train_labels, "train")
    check_features(test_features, test_labels, "test")
    if int(train_labels.min()) < 0:
        raise ValueError("train_labels has images without a label (-1); a linear probe needs a label for every image")
    if len(torch.unique(train_labels)) < 2:
        raise ValueError(f"train_labels has one class only ({int(train_labels[0])}); a linear probe needs at least two")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must lie between 0 and 1")
    if fraction < 1:
        rows = few_labels(train_labels, fraction, seed)
        train_features, train_labels = train_features[rows], train_labels[rows]
    classes = torch.unique(train_labels)
    train_y, test_y = class_numbers(train_labels, classes), class_numbers(test_labels, classes)
    mean, scale = train_features.mean(0), train_features.std(0).clamp_min(1e-6)
    train_x, test_x = ((x - mean) / scale for x in (train_features, test_features))
    kept, held = stratified_split(train_y, len(train_y), 0.2 if fraction == 1 else 0.5, seed)
    best = strengths[0]
    if len(strengths) > 1 and len(held):
        trial = LogisticRegression(train_x[kept], train_y[kept], len(classes))
        right = {c: _right(train_x[held], train_y[held], *trial.fit(c, max_iter)) for c in sorted(strengths)}
        best = max(strengths, key=lambda c: (right[c], -strengths.index(c)))
    weights, bias = LogisticRegression(train_x, train_y, len(classes)).fit(best, max_iter)
    return Probe(test_x @ weights + bias, test_y, classes, best)


def _right(features: Tensor, labels: Tensor, weights: Tensor, bias: Tensor) -> int:
    return int(((features @ weights + bias).argmax(1) == labels).sum())


def few_labels(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """The rows of ``fraction`` of the labels: the same fraction of each class, two of each at least."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in torch.unique(labels):
        own = (labels == number).nonzero()[:, 0]
        count = min(len(own), max(2, round(fraction * len(own))))
        rows.append(own[torch.randperm(len(own), generator=generator)[:count]])
    return torch.cat(rows).sort().values
