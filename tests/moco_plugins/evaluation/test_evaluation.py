from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn

from moco_plugins import MoCo
from moco_plugins.backbones import build_backbone
from moco_plugins.data.datasets import DATASETS
from moco_plugins.data.splits import stratified_split
from moco_plugins.evaluation import (
    alignment,
    effective_rank,
    extract_features,
    few_labels,
    knn_accuracy,
    linear_probe,
    uniformity,
)


def clouds(count: int, seed: int, spread: float = 1.3) -> tuple[Tensor, Tensor]:
    """Points around five centres, which overlap."""
    centres = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (count,), generator=generator)
    return centres[labels] + spread * torch.randn(count, 12, generator=generator), labels


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.1), (20, 0.1), (20, 0.02), (300, 1.0)])
def test_knn_is_scikit_learns(k: int, temperature: float) -> None:
    train, test = clouds(300, 1), clouds(150, 2)
    reference = KNeighborsClassifier(k, metric="cosine", weights=lambda d: np.exp((1 - d) / temperature))
    reference.fit(train[0].numpy(), train[1].numpy())
    expected = reference.score(test[0].numpy(), test[1].numpy())
    assert 0.3 < expected < 0.99  # neither chance nor trivial
    assert knn_accuracy(*train, *test, k, temperature) == pytest.approx(expected, abs=1e-9)


def test_knn_weighs_by_similarity() -> None:
    # Two near neighbours of class 1 against three farther ones of class 0.
    bank = torch.tensor([[1.0, 0.05], [1.0, -0.05], [0.5, 1.0], [0.5, -1.0], [0.45, 1.0]])
    labels = torch.tensor([1, 1, 0, 0, 0])
    query = torch.tensor([[1.0, 0.0]])
    assert knn_accuracy(bank, labels, query, torch.tensor([1]), k=5, temperature=0.1) == 1
    assert knn_accuracy(bank, labels, query, torch.tensor([1]), k=5, temperature=100.0) == 0


def test_knn_clamps_k_and_survives_small_temperatures() -> None:
    train, test = clouds(10, 1), clouds(20, 2)
    assert knn_accuracy(*train, *test, k=1000) == knn_accuracy(*train, *test, k=10)
    assert knn_accuracy(*train, *test, k=10, temperature=1e-4) == knn_accuracy(*train, *test, k=1)


def test_knn_does_not_depend_on_scale() -> None:
    (train, labels), test = clouds(100, 1), clouds(50, 2)
    scales = torch.rand(100, 1) * 10 + 0.1
    assert knn_accuracy(train * scales, labels, *test) == knn_accuracy(train, labels, *test)


def test_probe_is_scikit_learns() -> None:
    train, test = clouds(400, 1), clouds(400, 2)
    accuracy, chosen = linear_probe(*train, *test, strengths=(1.0,))
    mean, scale = train[0].mean(0), train[0].std(0)
    reference = LogisticRegression(C=1.0 / 400, max_iter=2000, tol=1e-6)
    reference.fit(((train[0] - mean) / scale).numpy(), train[1].numpy())
    assert accuracy == pytest.approx(reference.score(((test[0] - mean) / scale).numpy(), test[1].numpy()), abs=0.0051)
    assert chosen == 1.0


def test_probe_chooses_its_strength_on_the_validation_part() -> None:
    (train, labels), test = clouds(200, 1, spread=3.0), clouds(100, 2)
    noise = torch.randn(200, 60, generator=torch.Generator().manual_seed(3))
    train, tested = torch.cat([train, noise], 1), torch.cat([test[0], torch.zeros(100, 60)], 1)
    strengths = (1e-3, 1.0, 1e4)
    kept, held = stratified_split(labels, 200, 0.2, seed=7)
    scaled = (train - train.mean(0)) / train.std(0)
    scores = {}
    for strength in strengths:
        reference = LogisticRegression(C=strength / len(kept), max_iter=300, tol=1e-3)
        reference.fit(scaled[kept].numpy(), labels[kept].numpy())
        scores[strength] = reference.score(scaled[held].numpy(), labels[held].numpy())
    best, second = sorted(scores.values(), reverse=True)[:2]
    assert best > second, "the choice must matter here"
    assert linear_probe(train, labels, tested, test[1], strengths, seed=7)[1] == max(scores, key=lambda c: scores[c])


def test_few_labels_takes_the_same_fraction_of_each_class() -> None:
    labels = torch.tensor([0] * 200 + [1] * 100 + [2] * 3)
    rows = few_labels(labels, 0.1, seed=0)
    assert labels[rows].bincount().tolist() == [20, 10, 2]
    assert not torch.equal(rows, few_labels(labels, 0.1, seed=1))


def test_probe_with_few_labels_is_worse() -> None:
    train, test = clouds(1000, 1), clouds(500, 2)
    assert linear_probe(*train, *test, fraction=0.01)[0] < linear_probe(*train, *test)[0]


def test_what_features_look_like() -> None:
    torch.manual_seed(0)
    assert effective_rank(torch.randn(4000, 8)) == pytest.approx(8, abs=0.05)
    assert effective_rank(torch.randn(500, 1) @ torch.randn(1, 8)) == pytest.approx(1, abs=1e-3)
    assert effective_rank(torch.ones(10, 3)) == 0
    one_point = torch.ones(50, 4)
    assert uniformity(one_point) == pytest.approx(0, abs=1e-5)
    pair = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert uniformity(pair) == pytest.approx(-8, abs=1e-4)  # ln exp(-2 * 2²)
    assert alignment(pair, pair) == 0
    assert alignment(pair, -pair) == pytest.approx(4)
    assert uniformity(torch.randn(500, 4096)) == pytest.approx(-4, abs=0.01)  # in many dimensions all d² are near 2


def test_extraction_leaves_no_trace() -> None:
    train, _ = DATASETS["digits"](None)
    part = train.subset(range(70))
    backbone, width = build_backbone("convnet", 1, 8)
    moco = MoCo(backbone, width, queue_size=64, projection_dim=8)
    moco.query_encoder.projector.eval()  # an odd mode that must come back
    loss = moco([torch.rand(8, 1, 8, 8), torch.rand(8, 1, 8, 8)])
    loss.backward()
    state = {name: value.clone() for name, value in moco.state_dict().items()}
    modes = {name: module.training for name, module in moco.named_modules()}
    random_before = torch.get_rng_state()
    features, labels = extract_features(moco, part, batch_size=32)
    assert features.shape == (70, width)
    assert torch.equal(labels, part.labels)  # type: ignore[arg-type]
    assert all(torch.equal(value, state[name]) for name, value in moco.state_dict().items())
    assert modes == {name: module.training for name, module in moco.named_modules()}
    assert torch.equal(random_before, torch.get_rng_state())


def test_extraction_is_in_eval_mode() -> None:
    train, _ = DATASETS["digits"](None)
    backbone, _ = build_backbone("convnet", 1, 8)
    whole, _ = extract_features(backbone, train.subset(range(40)))
    parts, _ = extract_features(backbone, train.subset(range(40)), batch_size=7)
    torch.testing.assert_close(whole, parts)  # batch statistics would tell


def test_a_backbone_that_raises_gets_its_mode_back() -> None:
    class Broken(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            raise RuntimeError("no")

    broken = Broken()
    with pytest.raises(RuntimeError, match="no"):
        extract_features(broken, DATASETS["digits"](None)[0])
    assert broken.training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k=0"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"train_labels": torch.full((30,), -1)}, "needs a label for every image"),
        ({"train_labels": torch.zeros(3, dtype=torch.long)}, "3 entries and train_features 30"),
        ({"test_features": torch.zeros(0, 12)}, "N >= 1"),
    ],
)
def test_knn_bad_input(change: dict[str, object], message: str) -> None:
    train, test = clouds(30, 1), clouds(20, 2)
    arguments = {"train_features": train[0], "train_labels": train[1], "test_features": test[0], "test_labels": test[1]}
    with pytest.raises(ValueError, match=message):
        knn_accuracy(**{**arguments, **change})  # type: ignore[arg-type]


def test_probe_bad_input() -> None:
    (train, labels), test = clouds(30, 1), clouds(20, 2)
    with pytest.raises(ValueError, match="one class only"):
        linear_probe(train, torch.zeros_like(labels), *test)
    with pytest.raises(ValueError, match="needs a label for every image"):
        linear_probe(train, torch.full_like(labels, -1), *test)
    with pytest.raises(ValueError, match="fraction=0"):
        linear_probe(train, labels, *test, fraction=0)
    assert not math.isnan(linear_probe(train, labels, *test)[0])
