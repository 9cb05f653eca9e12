"""A linear classifier on frozen features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..data.grouping import copied, grouped_split
from ..data.splits import stratified_split
from .checks import check_features, class_numbers
from .logistic import LogisticRegression
from .metrics import mean_average_precision

#: Inverse regularisation strengths that the linear probe chooses from.
PROBE_C = (0.1, 1.0, 10.0, 100.0)


class Probe(NamedTuple):
    """What a linear probe says of test images."""

    logits: Tensor  #: (M, classes)
    #: (M,), the column of ``logits`` that is right; -1: a class that the training part has not. Of several labels (M, classes)
    labels: Tensor
    classes: Tensor  #: (classes,), the label that each column stands for
    strength: float  #: the C that was chosen

    @property
    def accuracy(self) -> float:
        """The part of the test images whose largest logit is the right one."""
        return float((self.logits.argmax(1) == self.labels).float().mean())

    @property
    def score(self) -> float:
        """The accuracy, or where images have several labels the mean average precision."""
        return self.accuracy if self.labels.ndim == 1 else mean_average_precision(self.logits, self.labels)


def linear_probe(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    strengths: Sequence[float] = PROBE_C,
    fraction: float = 1.0,
    seed: int = 0,
    max_iter: int = 300,
    groups: Tensor | None = None,
) -> tuple[float, float]:
    """Return (score, C) of :func:`probe`, whose arguments it takes: accuracy, or mean average precision of several labels."""
    found = probe(
        train_features,
        train_labels,
        test_features,
        test_labels,
        strengths,
        fraction,
        seed=seed,
        max_iter=max_iter,
        groups=groups,
    )
    return found.score, found.strength


def probe(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    strengths: Sequence[float] = PROBE_C,
    fraction: float = 1.0,
    seed: int = 0,
    max_iter: int = 300,
    groups: Tensor | None = None,
) -> Probe:
    """Fit logistic regression on frozen features, and return what it says of the test images.

    It is multinomial; where images have several labels, each class is told from the others by itself (binary
    cross-entropy). Features are standardised with the mean and deviation of the training part. C is the one that is best on
    a validation part, a fifth of the training images; the final fit uses all of them.

    Args:
        train_features: (N, D).
        train_labels: (N,), any whole numbers from 0; or (N, classes) of 0 and 1.
        test_features: (M, D).
        test_labels: (M,) or (M, classes).
        strengths: the C to choose from.
        fraction: use only this fraction of the training labels, the same of each class and at least two of each.
        seed: decides the validation part and the labels that are used.
        max_iter: iterations of L-BFGS; a few dozen do.
        groups: (N,), training images that stay on one side of the validation cut, such as a patient's; None: each by itself.

    Raises:
        ValueError: fewer than two classes, or images without label.
    """
    check_features(train_features, train_labels, "train")
    check_features(test_features, test_labels, "test")
    if train_labels.ndim != test_labels.ndim:
        raise ValueError(
            f"test_labels has shape {tuple(test_labels.shape)} and train_labels {tuple(train_labels.shape)}; both are (N,) or "
            "(N, classes)"
        )
    if int(train_labels.min()) < 0:
        raise ValueError("train_labels has images without a label (-1); a linear probe needs a label for every image")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must lie between 0 and 1")
    if fraction < 1:
        rows = few_labels(train_labels, fraction, seed)
        train_features, train_labels = train_features[rows], train_labels[rows]
        groups = None if groups is None else groups[rows]
    train_y, test_y, classes = _targets(train_labels, test_labels)
    mean, scale = train_features.mean(0), train_features.std(0).clamp_min(1e-6)
    train_x, test_x = ((x - mean) / scale for x in (train_features, test_features))
    kept, held = _validation(train_y, groups, 0.2 if fraction == 1 else 0.5, seed)
    best = strengths[0]
    if len(strengths) > 1 and len(held):
        trial = _Fit(train_x[kept], train_y[kept], len(classes), max_iter)
        right = {c: _score(trial(train_x[held], c), train_y[held]) for c in sorted(strengths)}
        best = max(strengths, key=lambda c: (right[c], -strengths.index(c)))
    return Probe(_Fit(train_x, train_y, len(classes), max_iter)(test_x, best), test_y, classes, best)


def _targets(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Labels as columns of the logits, and the label that each column stands for."""
    if train.ndim == 2:
        if not bool((train.any(0) & ~train.all(0)).any()):
            raise ValueError("train_labels has no class with images in it and not in it; a linear probe needs one")
        return train, test, torch.arange(train.shape[1])
    classes = torch.unique(train)
    if len(classes) < 2:
        raise ValueError(f"train_labels has one class only ({int(train[0])}); a linear probe needs at least two")
    return class_numbers(train, classes), class_numbers(test, classes), classes


def _validation(labels: Tensor, groups: Tensor | None, part: float, seed: int) -> tuple[Tensor, Tensor]:
    """Which rows choose C, and by which; whole groups, as far as there are two."""
    if groups is None or not copied(groups) or len(torch.unique(groups)) < 2:
        return stratified_split(labels, len(labels), part, seed)
    return grouped_split(labels, groups, part, seed)


class _Fit:
    """Logistic regression on some rows; called with features and C it gives logits (M, classes).

    Of several labels, classes that all rows have, or none, tell nothing: their logits are 0.
    """

    def __init__(self, features: Tensor, labels: Tensor, classes: int, max_iter: int) -> None:
        self.classes, self.max_iter, self.told = classes, max_iter, None
        if labels.ndim == 2:
            self.told = (labels.any(0) & ~labels.all(0)).nonzero()[:, 0]
            labels, classes = labels[:, self.told], len(self.told)
        self.regression = LogisticRegression(features, labels, classes) if classes else None

    def __call__(self, features: Tensor, strength: float) -> Tensor:
        if self.regression is None:
            return features.new_zeros(len(features), self.classes)
        weights, bias = self.regression.fit(strength, self.max_iter)
        logits = features @ weights + bias
        if self.told is None:
            return logits
        return features.new_zeros(len(features), self.classes).index_copy_(1, self.told, logits)


def _score(logits: Tensor, labels: Tensor) -> float:
    if labels.ndim == 1:
        return float((logits.argmax(1) == labels).sum())
    return mean_average_precision(logits, labels) if bool(labels.any()) else 0.0


def few_labels(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """The rows of ``fraction`` of the labels: the same fraction of each class, two of each at least.

    Where images have several labels (N, classes): of all images, and two of each class at least.
    """
    generator = torch.Generator().manual_seed(seed)
    if labels.ndim == 2:
        order = torch.randperm(len(labels), generator=generator)
        mixed = labels[order]
        needed = ((mixed > 0) & (mixed.cumsum(0) <= 2)).any(1)
        first = torch.cat([needed.nonzero()[:, 0], (~needed).nonzero()[:, 0]])
        return order[first[: max(int(needed.sum()), round(fraction * len(labels)), 2)]].sort().values
    rows = []
    for number in torch.unique(labels):
        own = (labels == number).nonzero()[:, 0]
        count = min(len(own), max(2, round(fraction * len(own))))
        rows.append(own[torch.randperm(len(own), generator=generator)[:count]])
    return torch.cat(rows).sort().values
