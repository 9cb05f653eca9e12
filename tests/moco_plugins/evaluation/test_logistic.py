"""The probe's solver finds the minimum that scikit-learn finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression as Reference

from moco_plugins.evaluation import knn, linear_probe, logistic, probe
from moco_plugins.evaluation.logistic import LogisticRegression


def some(rows: int, dim: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + dim)
    labels = torch.arange(rows) % classes
    centres = torch.randn(classes, dim, generator=generator)
    mixing = torch.randn(dim, dim, generator=generator) * torch.logspace(0, -2, dim)  # some directions count for little
    x = (centres[labels] + torch.randn(rows, dim, generator=generator) * 2) @ mixing
    return (x - x.mean(0)) / x.std(0), labels


@pytest.mark.parametrize(("rows", "dim"), [(400, 20), (60, 200)], ids=["tall", "wide"])
@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("strength", [0.1, 10.0])
def test_the_minimum_is_scikit_learns(rows: int, dim: int, classes: int, strength: float) -> None:
    x, y = some(rows, dim, classes)
    weights, bias = LogisticRegression(x, y, classes).fit(strength, tolerance=1e-6)
    reference = Reference(C=strength / rows, tol=1e-8, max_iter=5000).fit(x.double().numpy(), y.numpy())
    expected = torch.tensor(reference.predict_proba(x.double().numpy()))
    torch.testing.assert_close(F.softmax(x @ weights + bias, dim=1).double(), expected, atol=1e-3, rtol=0)


def test_a_second_fit_starts_at_the_first_and_ends_where_a_fresh_one_does() -> None:
    x, y = some(300, 30, 4)
    one = LogisticRegression(x, y, 4)
    one.fit(0.1)
    again, fresh = one.fit(10.0), LogisticRegression(x, y, 4).fit(10.0)
    torch.testing.assert_close(x @ again[0] + again[1], x @ fresh[0] + fresh[1], atol=2e-2, rtol=0)


def test_labels_may_be_any_numbers() -> None:
    x, y = some(300, 10, 3)
    names = torch.tensor([7, 10**12, 5])[y]
    assert linear_probe(x, names, x, names) == linear_probe(x, (y + 1) % 3, x, (y + 1) % 3)
    assert knn.knn_accuracy(x, names, x, names) == knn.knn_accuracy(x, (y + 1) % 3, x, (y + 1) % 3)


def test_a_class_that_only_the_test_part_has_counts_as_wrong() -> None:
    x, y = some(300, 10, 3)
    seen = y < 2
    whole = probe(x[seen], y[seen], x, y)
    assert set(whole.labels.tolist()) == {0, 1, -1}
    assert whole.accuracy <= float(seen.float().mean())


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = some(500, 16, 4)
    bank, queries = x[:400].double(), x[400:].double()
    expected = knn.nearest(bank, queries, 30)
    accuracy = knn.knn_accuracy(bank, y[:400], queries, y[400:])
    monkeypatch.setattr(knn, "_BANK", 17)
    monkeypatch.setattr(knn, "_QUERIES", 9)
    monkeypatch.setattr(knn, "_CELLS", 8)
    for ours, theirs in zip(knn.nearest(bank, queries, 30), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert knn.knn_accuracy(bank, y[:400], queries, y[400:]) == accuracy


def passes(x: torch.Tensor, y: torch.Tensor, strength: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often the solver looks at the data."""
    count, solve = 0, logistic._lbfgs

    def counting(objective: Any, *rest: Any) -> torch.Tensor:
        def counted(point: torch.Tensor) -> tuple[float, torch.Tensor]:
            nonlocal count
            count += 1
            return objective(point)

        return solve(counted, *rest)

    monkeypatch.setattr(logistic, "_lbfgs", counting)
    LogisticRegression(x, y, int(y.max()) + 1).fit(strength)
    return count


def test_it_takes_few_passes_where_directions_differ_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(2000) % 10
    centres = 0.1 * torch.randn(10, 300, generator=generator)
    turn = torch.linalg.qr(torch.randn(300, 300, generator=generator)).Q
    x = (centres[y] + torch.randn(2000, 300, generator=generator)) * torch.logspace(1, -2, 300) @ turn
    x = (x - x.mean(0)) / x.std(0)
    plain = Reference(C=100.0 / 2000, max_iter=3000, tol=2e-5).fit(x.numpy(), y.numpy())
    assert 2 * passes(x, y, 100.0, monkeypatch) < int(plain.n_iter_[0])


def test_the_leading_directions_of_large_features_do(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = some(400, 150, 4)
    whole = LogisticRegression(x, y, 4).fit(10.0)
    monkeypatch.setattr(logistic, "_EXACT", 50)
    monkeypatch.setattr(logistic, "_LEADING", 20)
    state = torch.get_rng_state()
    assert logistic.basis(x).vectors.shape == (150, 20)
    part = LogisticRegression(x, y, 4).fit(10.0)
    torch.testing.assert_close(x @ part[0] + part[1], x @ whole[0] + whole[1], atol=2e-2, rtol=0)
    assert torch.equal(state, torch.get_rng_state())  # nobody else's random numbers were drawn
