"""The metrics are what they say, cost nothing until asked for, and change nothing."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import small_backbone, small_views
from torch import Tensor, nn

from moco_plugins import MoCo
from moco_plugins.core.diagnostics import effective_rank


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


def by_hand(q: Tensor, k: Tensor, negatives: Tensor, in_batch: bool) -> dict[str, float]:
    positive = (q * k).sum(1)
    rows = [
        torch.stack([q[i] @ n for n in [*negatives, *(k[j] for j in range(len(k)) if in_batch and j != i)]])
        for i in range(len(q))
    ]
    singular = torch.linalg.svdvals(q)
    share = singular / singular.sum()
    return {
        "positive_cosine": float(positive.mean()),
        "negative_cosine": float(torch.stack(rows).mean()),
        "contrastive_top1": sum(float(p > row.max()) for p, row in zip(positive, rows, strict=True)) / len(q),
        "loss_reference": math.log(len(rows[0]) + 1),
        "feature_std": float(((q - q.mean(0)) ** 2).mean(0).sqrt().mean()),
        "feature_std_reference": 1 / math.sqrt(q.shape[1]),
        "effective_rank": math.exp(-float((share * share.log()).sum())),
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"in_batch_negatives": True},
        {"variant": "v2+"},
        {"queue_fill": "empty"},
        {"variant": "v3", "queue_size": 0, "hidden_dim": 12},
    ],
    ids=str,
)
def test_metrics_are_what_they_say(options: dict[str, Any]) -> None:
    moco, optimizer = trained(**options)
    queue = moco.queue.negatives().clone() if moco.queue is not None else torch.zeros(0, 8)
    views = small_views(9, torch.float32)
    with torch.no_grad():
        twin = copy.deepcopy(moco)
        projected = twin.query_encoder(views[0])
        q = F.normalize(twin.predictor(projected) if twin.predictor is not None else projected, dim=1)
        k = F.normalize(twin.key_encoder(views[1]), dim=1)
    loss = moco(views)
    before = moco.metrics()
    for name, value in by_hand(q, k, queue, moco.settings.in_batch_negatives).items():
        assert before[name] == pytest.approx(value, abs=2e-5), name
    assert before["loss"] == pytest.approx(float(loss.detach()))
    assert before["temperature"] == pytest.approx(0.2)
    assert before["momentum"] == pytest.approx(moco.momentum)
    assert before.get("queue_filled", 24 / 40) == (
        48 / 40 > 1 or 24 / 40 if options.get("variant") == "v2+" else 24 / 40
    )

    # After the step the keys of this batch are in the queue, and still no negatives of it.
    loss.backward()
    optimizer.step()
    after = moco.metrics()
    for name in ("loss", "positive_cosine", "feature_std", "effective_rank", "loss_reference"):
        assert after[name] == before[name]
    if moco.queue is not None and not options:
        rows = queue[[i for i in range(40) if i not in {(24 + j) % 40 for j in range(9)}]]
        assert after["negative_cosine"] == pytest.approx(float((q @ rows.T).mean()), abs=2e-5)


def test_metrics_of_the_queue() -> None:
    moco, optimizer = trained(2)
    assert moco.metrics()["queue_filled"] == 16 / 40
    assert moco.metrics()["nonfinite_keys"] == 0
    views = small_views(8, torch.float32)
    views[1][3] = torch.nan
    moco(views).backward()
    optimizer.step()
    assert moco.metrics()["nonfinite_keys"] == 1
    assert moco.metrics()["queue_filled"] == 23 / 40


def test_effective_rank() -> None:
    assert effective_rank(torch.ones(10, 4)) == pytest.approx(1, abs=1e-3)
    assert effective_rank(torch.eye(6).repeat(3, 1)) == pytest.approx(6, abs=1e-3)
    assert effective_rank(torch.eye(6)[:, :3].repeat(2, 1)) == pytest.approx(3, abs=1e-3)
    assert effective_rank(torch.randn(4000, 16)) > 15.5
    assert effective_rank(torch.zeros(4, 3)) == pytest.approx(1, abs=1e-3)


def test_metrics_change_nothing() -> None:
    moco, _ = trained(4, backbone=small_backbone(batch_norm=True), drift_probe=4)
    moco.key_encoder.eval()  # somebody's choice, to be kept
    before = copy.deepcopy(moco.state_dict())
    modes = [module.training for module in moco.modules()]
    random_state = torch.get_rng_state()
    first, second = moco.metrics(), moco.metrics()
    assert first == second
    assert "key_drift" in first
    assert modes == [module.training for module in moco.modules()]
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in moco.state_dict().items())


def test_training_with_and_without_a_look_at_the_metrics_is_the_same() -> None:
    states = []
    for look in (False, True):
        torch.manual_seed(1)
        moco = make(small_backbone(batch_norm=True), drift_probe=4 if look else 0)
        optimizer = torch.optim.SGD(moco.parameters(), 0.1)
        for _ in range(5):
            moco(small_views(16, torch.float32)).backward()
            if look:
                moco.metrics()
            optimizer.step()
            optimizer.zero_grad()
            if look:
                moco.metrics()
                moco.key_drift()
        states.append(moco.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_training_step_computes_no_metrics() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    names: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    moco, optimizer = trained()
    with Recorder():
        moco(small_views(8, torch.float32)).backward()
        optimizer.step()
    assert names
    assert not any(word in name for name in names for word in ("std", "svd", "aten.max", "var"))


def test_diverged_features_are_reported_and_raise_nothing() -> None:
    moco, _ = trained()
    with torch.no_grad():
        moco.query_encoder.projector[-1].bias.fill_(torch.nan)
    moco(small_views(8, torch.float32))
    metrics = moco.metrics()
    assert math.isnan(metrics["loss"])
    assert math.isnan(metrics["effective_rank"])


class Constant(nn.Module):
    """A backbone that has collapsed: the same features for all images."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Parameter(torch.randn(16))

    def forward(self, images: Tensor) -> Tensor:
        return self.features.expand(len(images), 16) + 1e-4 * images.flatten(1).mean(1, keepdim=True)


def test_collapse_is_reported_with_what_to_try() -> None:
    moco = make(Constant())
    moco(small_views(8, torch.float32))
    with pytest.warns(UserWarning, match=r"collapsed.*std is 0\.0.*0\.3536.*learning rate.*momentum.*queue.*views"):
        metrics = moco.metrics()
    assert metrics["feature_std"] < 0.01
    assert metrics["effective_rank"] < 1.1


def test_metrics_of_a_collapsed_model_are_complete() -> None:
    moco = make(Constant())
    optimizer = torch.optim.SGD(moco.parameters(), 0.0)
    for _ in range(6):  # the queue holds one and the same key everywhere
        moco(small_views(8, torch.float32)).backward()
        optimizer.step()
    with pytest.warns(UserWarning, match="collapsed"):
        metrics = moco.metrics()
    assert metrics["negative_cosine"] == pytest.approx(1, abs=1e-3)
    assert metrics["loss"] == pytest.approx(metrics["loss_reference"], abs=1e-2)


def test_a_collapse_is_reported_once_and_not_at_every_look() -> None:
    moco = make(Constant())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            moco(small_views(8, torch.float32))
            moco.metrics()
    assert len(caught) == 1


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_healthy_features_of_any_batch_size_are_not_called_collapsed(batch: int) -> None:
    moco, _ = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moco(small_views(batch, torch.float32))
        moco.metrics()
