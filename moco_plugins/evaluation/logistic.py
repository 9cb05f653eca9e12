"""Logistic regression, multinomial or of each class by itself, on a whole set: L-BFGS in a basis where the problem is round.

Features of neural networks, and raw pixels more so, are correlated: their covariance has a few large eigenvalues and very
many small ones, and a plain L-BFGS needs hundreds of passes over the data. The Hessian of the loss lies below a multiple of
that covariance (Boehning 1992), so its leading eigenvectors, found once for all strengths, make a good first guess of
the inverse Hessian; what is left takes some tens of passes. The optimum is the same: scikit-learn's with solver="lbfgs".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: Up to this rank all eigenvectors are taken.
_EXACT = 1024
#: Eigenvectors that are taken of larger features; the rest counts as round.
_LEADING = 192
_MEMORY = 12


class Basis(NamedTuple):
    """Leading eigenvectors (D, R) of the features' second moments, their values (R,), and what stands for the others."""

    vectors: Tensor
    values: Tensor
    rest: float


class LogisticRegression:
    """argmin over (W, b) of mean cross-entropy of (X W + b) + |W|² / (2 s), with the intercept b not penalised.

    For two classes W is one vector and its negative, penalised as that one vector, as in scikit-learn's
    ``LogisticRegression(C=s / N)``, which finds the same minimum. Where an image may have several labels, each class is a
    binary regression of its own, and the loss their sum: scikit-learn's ``OneVsRestClassifier``.

    Args:
        features: X, (N, D), float; standardised, or at least centred and of one scale.
        labels: (N,), class numbers from 0 to ``classes`` - 1; or (N, classes) of 0 and 1, each class with both.
        classes: number of classes, 2 or more; of several labels 1 or more.
    """

    def __init__(self, features: Tensor, labels: Tensor, classes: int) -> None:
        self.features, self.classes, self.several = features, classes, labels.ndim == 2
        self.targets = (labels if self.several else F.one_hot(labels, classes)).to(features.dtype)
        self._basis = basis(features)
        self._start = features.new_zeros(features.shape[1] + 1, classes)  # the last solution

    @torch.no_grad()
    def fit(self, strength: float, max_iter: int = 300, tolerance: float = 2e-5) -> tuple[Tensor, Tensor]:
        """Return (W, b), (D, classes) and (classes,), for the penalty |W|² / (2 ``strength``); starts at the last fit.

        ``tolerance`` is the largest component of the gradient at the end.
        """
        x, count = self.features, len(self.features)
        penalty = (2.0 if self.classes == 2 and not self.several else 1.0) / strength

        def objective(point: Tensor) -> tuple[float, Tensor]:
            logits = torch.addmm(point[-1], x, point[:-1])
            if self.several:
                loss, told = F.softplus(logits).sum() - (logits * self.targets).sum(), logits.sigmoid()
            else:
                shifted = torch.log_softmax(logits, 1)
                loss, told = -(shifted * self.targets).sum(), shifted.exp_()
            value = loss / count + penalty / 2 * point[:-1].square().sum()
            error = told.sub_(self.targets).div_(count)
            return float(value), torch.cat([(error.T @ x).T + penalty * point[:-1], error.sum(0, keepdim=True)])

        # The curvature of a class's logit is p (1 - p): what that is before anything is learnt is near enough.
        curvature = 0.25 if self.several else (self.classes - 1) / self.classes**2
        floor = 1 / (curvature * self._basis.rest + penalty)
        gain = (1 / (curvature * self._basis.values + penalty) - floor)[:, None]

        def inverse_hessian(gradient: Tensor) -> Tensor:
            turned = self._basis.vectors @ (gain * (self._basis.vectors.T @ gradient[:-1]))
            return torch.cat([floor * gradient[:-1] + turned, gradient[-1:] / curvature])

        self._start = _lbfgs(objective, inverse_hessian, self._start, max_iter, tolerance)
        return self._start[:-1], self._start[-1]


def basis(features: Tensor) -> Basis:
    """The basis of features (N, D); the same for the same features, and no random number of others is drawn."""
    count, width = features.shape
    if min(count, width) > _EXACT:
        return _leading(features)
    if width <= count:
        values, vectors = torch.linalg.eigh((features.T @ features / count).double())
    else:
        values, left = torch.linalg.eigh((features @ features.T / count).double())
        vectors = features.T.double() @ left / (values * count).clamp_min(1e-12).sqrt()
    kept = values > 1e-7 * values[-1].clamp_min(1e-12)
    return Basis(vectors[:, kept].float(), values[kept].float(), 0.0)


def _leading(features: Tensor) -> Basis:
    """By random projections (Halko, Martinsson & Tropp 2011, arXiv:0909.4061, algorithm 5.3)."""
    rank, generator = _LEADING, torch.Generator(features.device).manual_seed(0)
    # Some of the rows tell the large directions; the basis need not be exact, it only makes the way shorter.
    some = features[:: max(1, len(features) // 2500)]
    span = torch.randn(features.shape[1], rank, generator=generator, device=features.device)
    for _ in range(2):
        span = torch.linalg.qr(some.T @ (some @ span)).Q
    values, turn = torch.linalg.eigh((some @ span).T @ (some @ span) / len(some))
    rest = float((some.square().sum() / len(some) - values.sum()).clamp_min(0)) / (features.shape[1] - rank)
    return Basis(span @ turn, values, max(rest, float(values[0]) / 2))


def _lbfgs(
    objective: Callable[[Tensor], tuple[float, Tensor]],
    inverse_hessian: Callable[[Tensor], Tensor],
    point: Tensor,
    max_iter: int,
    tolerance: float,
) -> Tensor:
    """Minimise a convex function (Nocedal & Wright 2006, algorithm 7.4), from a guess of its inverse Hessian."""
    value, gradient = objective(point)
    steps: list[tuple[Tensor, Tensor, float]] = []
    for _ in range(max_iter):
        if float(gradient.abs().max()) <= tolerance:
            break
        direction = -_two_loops(gradient, steps, inverse_hessian)
        slope = float((direction * gradient).sum())
        length = 1.0
        for _ in range(20):
            trial = point + length * direction
            new_value, new_gradient = objective(trial)
            if new_value <= value + 1e-4 * length * slope + 1e-7 * abs(value):
                break
            length /= 2
        else:
            break  # float32 tells no lower value
        moved, bent = trial - point, new_gradient - gradient
        product = float((moved * bent).sum())
        if product > 1e-10 * float(bent.square().sum()):
            steps = [*steps[-_MEMORY + 1 :], (moved, bent, product)]
        point, value, gradient = trial, new_value, new_gradient
    return point


def _two_loops(
    gradient: Tensor, steps: list[tuple[Tensor, Tensor, float]], inverse_hessian: Callable[[Tensor], Tensor]
) -> Tensor:
    shares = []
    for moved, bent, product in reversed(steps):
        share = float((moved * gradient).sum()) / product
        gradient = gradient - share * bent
        shares.append(share)
    direction = inverse_hessian(gradient)
    for (moved, bent, product), share in zip(steps, reversed(shares), strict=True):
        direction = direction + moved * (share - float((bent * direction).sum()) / product)
    return direction
