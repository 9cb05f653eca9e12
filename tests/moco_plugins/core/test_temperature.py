"""A temperature that is trained stays at 0.01 or above, can come back from there, and does not decay."""

from __future__ import annotations

import warnings

import pytest
import torch
from reference import small_views
from training import make, train_step

from moco_plugins.core.lars import LARS


def test_it_is_bound_below_and_comes_back() -> None:
    moco = make(learnable_temperature=True, temperature=0.0101)
    lowering = {"params": [moco.log_temperature], "lr": 1.0}
    optimizer = torch.optim.SGD([lowering, {"params": moco.query_encoder.parameters(), "lr": 0.0}])
    for _ in range(3):
        moco(small_views(6)).backward()
        moco.log_temperature.grad = torch.tensor(5.0, dtype=torch.float64)  # downhill is down
        optimizer.step()
        optimizer.zero_grad()
        assert float(moco.temperature.detach()) == pytest.approx(0.01)
    loss = moco(small_views(6))
    loss.backward()
    assert moco.log_temperature.grad != 0  # at the bound the gradient still comes through
    moco.log_temperature.grad.fill_(-0.5)
    optimizer.step()
    assert float(moco.temperature.detach()) == pytest.approx(0.01 * torch.tensor(0.5).exp().item())


def test_it_is_bound_within_a_step_too() -> None:
    moco = make(learnable_temperature=True)
    with torch.no_grad():
        moco.log_temperature.fill_(-50.0)
    assert float(moco.temperature.detach()) == pytest.approx(0.01)
    assert torch.isfinite(moco(small_views(6)))


def test_a_start_below_the_bound_is_refused() -> None:
    with pytest.raises(ValueError, match=r"temperature=0\.005 with learnable_temperature=True.*0\.01 or more"):
        make(learnable_temperature=True, temperature=0.005)
    assert make(temperature=0.005).temperature == 0.005


def test_decay_is_told_once_with_the_cure() -> None:
    moco = make(learnable_temperature=True)
    optimizer = torch.optim.AdamW(moco.parameters(), 1e-3, weight_decay=0.05)

    def train() -> None:
        for _ in range(4):
            train_step(moco, optimizer, small_views(6))

    with pytest.warns(UserWarning, match=r"weight_decay=0\.05 draws the learnable.*log_temperature") as caught:
        train()
    assert len(caught) == 1


@pytest.mark.parametrize("how", ["a group of its own", "LARS"])
def test_where_it_does_not_decay_nothing_is_told(how: str) -> None:
    moco = make(learnable_temperature=True)
    rest = [p for p in moco.parameters() if p is not moco.log_temperature]
    if how == "LARS":
        optimizer: torch.optim.Optimizer = LARS(moco.parameters(), 0.1, weight_decay=0.1)
    else:
        groups = [{"params": rest}, {"params": [moco.log_temperature], "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, 1e-3, weight_decay=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            train_step(moco, optimizer, small_views(6))
