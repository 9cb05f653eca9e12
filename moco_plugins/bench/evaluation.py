"""How good a frozen backbone is: weighted kNN, linear probe, and what its features look like.

Everything here reads: weights, BatchNorm statistics, training mode and the random state are the same afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..datasets import stratified_split
from .loader import as_batch

#: Inverse regularisation strengths that the linear probe chooses from.
PROBE_C = (0.1, 1.0, 10.0, 100.0)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every part of ``model`` in eval mode, then each back into the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def extract_features(
    method: nn.Module,
    images: Any,
    finish: Callable[[Tensor], Tensor] = lambda batch: batch,
    image_size: int | None = None,
    batch_size: int = 500,
) -> tuple[Tensor, Tensor]:
    """Return the features (N, D), float32 on the CPU, of all images and their labels (N,), -1 where there is none.

    Args:
        method: a :class:`moco_plugins.method.Method` (its ``embed`` is used), or a backbone.
        images: a map-style data set of (image, label).
        finish: applied to each batch (N, C, H, W) with values from 0 to 1: normalisation as a rule.
        image_size: scale and cut the images to this size; None: as they are.
        batch_size: images in one forward pass.
    """
    embed = getattr(method, "embed", method)
    device = next((p.device for p in method.parameters()), torch.device("cpu"))
    features, labels = [], []
    with evaluating(method):
        for start in range(0, len(images), batch_size):
            batch, numbers = as_batch(images, range(start, min(start + batch_size, len(images))), image_size)
            features.append(embed(finish(batch).to(device)).float().cpu())
            labels.append(numbers)
    return torch.cat(features), torch.cat(labels)


@torch.no_grad()
def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    k: int = 20,
    temperature: float = 0.1,
) -> float:
    """Return the accuracy, 0 to 1, of weighted kNN on cosine similarity (Wu et al. 2018, arXiv:1805.01978, 3.4).

    Each of the k nearest training features votes for its class with weight exp(cosine / T).

    Args:
        train_features: (N, D), the bank; rows are normalised here.
        train_labels: (N,), from 0.
        test_features: (M, D).
        test_labels: (M,).
        k: neighbours, 20; at most N are used.
        temperature: T, 0.1; smaller lets nearer neighbours count for more.

    Raises:
        ValueError: no features, labels that do not match, k < 1 or T <= 0.
    """
    _check(train_features, train_labels, "train")
    _check(test_features, test_labels, "test")
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be greater than 0")
    if int(train_labels.min()) < 0:
        raise ValueError("train_labels has images without a label (-1); kNN accuracy needs a label for every image")
    bank = F.normalize(train_features, dim=1)
    classes = int(torch.cat([train_labels, test_labels]).max()) + 1
    right = 0
    for rows in torch.split(torch.arange(len(test_labels)), 1000):
        queries, truth = F.normalize(test_features[rows], dim=1), test_labels[rows]
        cosine, index = (queries @ bank.T).topk(min(k, len(bank)), dim=1)  # M x k
        # Weights relative to the nearest neighbour: the same winner, and no overflow for small T.
        weights = ((cosine - cosine[:, :1]) / temperature).exp()
        votes = torch.zeros(len(queries), classes).scatter_add_(1, train_labels[index], weights)
        right += int((votes.argmax(1) == truth).sum())
    return right / len(test_labels)


def _check(features: Tensor, labels: Tensor, name: str) -> None:
    if features.ndim != 2 or len(features) == 0:
        raise ValueError(f"{name}_features has shape {tuple(features.shape)}; it must be (N, D) with N >= 1")
    if len(labels) != len(features):
        raise ValueError(f"{name}_labels has {len(labels)} entries and {name}_features {len(features)} rows")


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
    _check(train_features, train_labels, "train")
    _check(test_features, test_labels, "test")
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


@torch.no_grad()
def alignment(first: Tensor, second: Tensor) -> float:
    """Mean squared distance of the normalised features of two views (Wang & Isola 2020, arXiv:2005.10242)."""
    return float((F.normalize(first, dim=1) - F.normalize(second, dim=1)).pow(2).sum(1).mean())


@torch.no_grad()
def uniformity(features: Tensor, most: int = 2000) -> float:
    """ln of the mean of exp(-2 d²) over pairs of normalised features (Wang & Isola 2020); 0: all are one point."""
    points = F.normalize(features[:most], dim=1)
    if len(points) < 2:
        raise ValueError(f"features has {len(points)} rows; uniformity needs at least two")
    return float(torch.pdist(points).pow(2).mul(-2).exp().mean().log())


@torch.no_grad()
def effective_rank(features: Tensor) -> float:
    """exp of the entropy of the normalised singular values (Roy & Vetterli 2007): how many directions are in use."""
    centred = (features - features.mean(0)).double()
    values = torch.linalg.eigvalsh(centred.T @ centred).clamp_min(0).sqrt()
    if not float(values.sum()) > 0:
        return 0.0
    share = values / values.sum()
    return float(torch.special.entr(share).sum().exp())
