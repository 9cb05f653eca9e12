"""Weighted kNN on cosine similarity."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_features, class_numbers
from .metrics import mean_average_precision

#: Rows of the bank and of the queries that are compared at a time, and numbers of votes held: some 250 MB each.
_BANK, _QUERIES, _CELLS = 65536, 1000, 2**26


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
        train_labels: (N,), any whole numbers from 0; for several labels an image see :func:`knn_mean_average_precision`.
        test_features: (M, D).
        test_labels: (M,).
        k: neighbours, 20; at most N are used.
        temperature: T, 0.1; smaller lets nearer neighbours count for more.

    Raises:
        ValueError: no features, labels that do not match, k < 1 or T <= 0.
    """
    if train_labels.ndim != 1:
        raise ValueError(
            f"train_labels has shape {tuple(train_labels.shape)}; it must be (N,): where images have several labels, "
            "use knn_mean_average_precision"
        )
    weights, index = _weights(train_features, train_labels, test_features, test_labels, k, temperature)  # M x k
    classes = torch.unique(train_labels)
    votes_for, truth = class_numbers(train_labels, classes)[index], class_numbers(test_labels, classes)
    right = 0
    for rows in torch.split(torch.arange(len(truth)), max(1, _CELLS // len(classes))):
        votes = weights.new_zeros(len(rows), len(classes)).scatter_add_(1, votes_for[rows], weights[rows])
        right += int((votes.argmax(1) == truth[rows]).sum())
    return right / len(test_labels)


@torch.no_grad()
def knn_mean_average_precision(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    k: int = 20,
    temperature: float = 0.1,
) -> float:
    """Return the mean average precision, 0 to 1, of weighted kNN where images have several labels.

    A class's score is the part of the k votes that comes from images of it; else as :func:`knn_accuracy`.

    Args:
        train_features: (N, D), the bank; rows are normalised here.
        train_labels: (N, classes), 0 or 1.
        test_features: (M, D).
        test_labels: (M, classes), 0 or 1; classes without an image do not count.
        k: neighbours, 20; at most N are used.
        temperature: T, 0.1.

    Raises:
        ValueError: as :func:`knn_accuracy`, or no class has a test image.
    """
    weights, index = _weights(train_features, train_labels, test_features, test_labels, k, temperature)
    weights = weights / weights.sum(1, keepdim=True)
    whole = train_labels.to(weights.dtype)
    blocks = torch.split(torch.arange(len(index)), max(1, _CELLS // max(1, index.shape[1] * whole.shape[1])))
    scores = [torch.einsum("mk,mkc->mc", weights[rows], whole[index[rows]]) for rows in blocks]
    return mean_average_precision(torch.cat(scores), test_labels)


def _weights(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    k: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """The weights (M, k) of the votes for each test image, and the rows (M, k) they come from; checks everything."""
    check_features(train_features, train_labels, "train")
    check_features(test_features, test_labels, "test")
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be greater than 0")
    if int(train_labels.min()) < 0:
        raise ValueError("train_labels has images without a label (-1); kNN needs a label for every image")
    cosine, index = nearest(train_features, test_features, min(k, len(train_features)))
    # Weights relative to the nearest neighbour: the same winner, and no overflow for small T.
    return ((cosine - cosine[:, :1]) / temperature).exp(), index


def nearest(bank: Tensor, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return (cosines, row numbers), (M, k) each, of the k rows of ``bank`` (N, D) nearest to each query (M, D).

    In blocks of both, so that beside features and result no more than a few hundred MiB are taken, whatever N is.
    """
    best: list[tuple[Tensor, Tensor]] = []
    blocks = torch.split(torch.arange(len(queries)), _QUERIES)
    for start in range(0, len(bank), _BANK):
        part = F.normalize(bank[start : start + _BANK], dim=1)
        for number, rows in enumerate(blocks):
            found, index = (F.normalize(queries[rows], dim=1) @ part.T).topk(min(k, len(part)), dim=1)
            index += start
            if start:
                found, place = torch.cat([best[number][0], found], 1).topk(min(k, start + len(part)), dim=1)
                index = torch.cat([best[number][1], index], 1).gather(1, place)
                best[number] = found, index
            else:
                best.append((found, index))
    return torch.cat([found for found, _ in best]), torch.cat([index for _, index in best])
