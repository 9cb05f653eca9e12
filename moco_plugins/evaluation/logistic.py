"""Multinomial logistic regression, for probes: L-BFGS of torch, preconditioned so that a few dozen iterations do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class LogisticRegression:
    """argmin over (W, b) of mean cross-entropy of (X W + b) + |W|² / (2 s), with the intercept b not penalised.

    For two classes W is one vector and its negative, penalised as that one vector, as in scikit-learn's
    ``LogisticRegression(C=s / N)``, which finds the same minimum.

    The curvature of the loss is at most half the features' second moments (Böhning 1992, eq. 2.1): a Cholesky factor of
    that bound, plus the penalty, is the change of variables in which L-BFGS works. It decides how fast the minimum is
    reached, not where it lies. With fewer rows than dimensions the fit is made in the rows' span, which holds the minimum.

    Args:
        features: X, (N, D), float; standardised, or at least centred and of one scale.
        labels: (N,), class numbers from 0 to ``classes`` - 1.
        classes: number of classes, 2 or more.
    """

    def __init__(self, features: Tensor, labels: Tensor, classes: int) -> None:
        self.basis: Tensor | None = None  # D x N, orthonormal
        if features.shape[0] < features.shape[1]:
            self.basis, triangle = torch.linalg.qr(features.T)
            features = triangle.T.contiguous()
        self.features, self.labels, self.classes = features, labels, classes
        self._moments = features.T @ features / len(features)  # D x D
        self._start: Tensor | None = None  # the last solution, (D + 1) x classes

    def fit(self, strength: float, max_iter: int = 100, tolerance: float = 1e-4) -> tuple[Tensor, Tensor]:
        """Return (W, b), (D, classes) and (classes,), for the penalty |W|² / (2 ``strength``); starts at the last fit."""
        x, y = self.features, self.labels
        dim = x.shape[1]
        penalty = (2.0 if self.classes == 2 else 1.0) / strength
        bound = self._moments * 0.5
        bound.diagonal().add_(penalty + 1e-7 * float(bound.diagonal().mean()))
        factor = torch.linalg.cholesky(bound)  # bound = L Lᵀ; W = L⁻ᵀ V
        v = x.new_zeros(dim + 1, self.classes)  # the last row is the intercept, whose curvature is about 1/2
        if self._start is not None:
            v[:-1], v[-1] = factor.T @ self._start[:-1], self._start[-1]
        v.requires_grad_()

        def weights() -> Tensor:
            return torch.linalg.solve_triangular(factor.T, v[:-1], upper=True)

        optimizer = torch.optim.LBFGS(
            [v],
            max_iter=max_iter,
            tolerance_grad=tolerance,
            tolerance_change=1e-9,
            history_size=10,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            w = weights()
            loss = F.cross_entropy(x @ w + v[-1], y) + penalty / 2 * w.square().sum()
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)
        with torch.no_grad():
            w = weights()
            self._start = torch.cat([w, v[-1:]])
            return (w if self.basis is None else self.basis @ w), v[-1].clone()
