"""A linear classifier on frozen features."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..data.splits import stratified_split
from .checks import check_features

#: Inverse regularisation strengths that the linear probe chooses from.
PROBE_C = (0.1, 1.0, 10.0, 100.0)


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
    """Return (accuracy, C) of multinomial logistic regression on the frozen features; scikit-learn does the fit.

    Features are standardised with the mean and deviation of the training part. C is the one that is best on a
    validation part, a fifth of the training images; the final fit uses all of them.

    Args:
        train_features: (N, D).
        train_labels: (N,).
        test_features: (M, D).
        test_labels: (M,).
        strengths: the C to choose from.
        fraction: use only this fraction of the training labels, the same of each class and at least two of each.
        seed: decides the validation part and the labels that are used.
        max_iter: iterations of L-BFGS.

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
    mean, scale = train_features.mean(0), train_features.std(0).clamp_min(1e-6)
    train_x, test_x = ((x - mean) / scale for x in (train_features, test_features))
    kept, held = stratified_split(train_labels, len(train_labels), 0.2 if fraction == 1 else 0.5, seed)
    best = strengths[0]
    if len(strengths) > 1 and len(held):
        scores = [(_fit(train_x[kept], train_labels[kept], c, max_iter)(train_x[held], train_labels[held]), -i)
                  for i, c in enumerate(strengths)]  # fmt: skip
        best = strengths[-max(scores)[1]]
    return _fit(train_x, train_labels, best, max_iter)(test_x, test_labels), best


def few_labels(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """The rows of ``fraction`` of the labels: the same fraction of each class, two of each at least."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in torch.unique(labels):
        own = (labels == number).nonzero()[:, 0]
        count = min(len(own), max(2, round(fraction * len(own))))
        rows.append(own[torch.randperm(len(own), generator=generator)[:count]])
    return torch.cat(rows).sort().values


def _fit(features: Tensor, labels: Tensor, strength: float, max_iter: int) -> Callable[[Tensor, Tensor], float]:
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    # C weighs the sum over samples against the penalty; divided by their number it means the same for any data set.
    classifier = LogisticRegression(C=strength / len(features), max_iter=max_iter, tol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a few iterations more change no digit that is shown
        classifier.fit(features.numpy(), labels.numpy())
    return lambda x, y: float(classifier.score(x.numpy(), y.numpy()))
