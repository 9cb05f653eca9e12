"""Weighted kNN on cosine similarity."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_features


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
    check_features(train_features, train_labels, "train")
    check_features(test_features, test_labels, "test")
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
