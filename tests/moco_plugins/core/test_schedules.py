"""Momentum as a function of the step."""

from __future__ import annotations

import math

import pytest
import torch
from reference import small_backbone, small_views
from torch import nn

from moco_plugins import Cosine, MoCo


def make(backbone: nn.Module | None = None, **options: object) -> MoCo:
    return MoCo(backbone or small_backbone(), 16, **{"queue_size": 20, "projection_dim": 8, **options})


def train_step(moco: MoCo, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> None:
    loss = moco(small_views(8, dtype))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_cosine_schedule() -> None:
    # Chen, Xie & He 2021, arXiv:2104.02057, section 4.1: from 0.99 to 1 by a half cosine.
    schedule = Cosine(0.99, 1.0)
    assert schedule(0, 100) == pytest.approx(0.99)
    assert schedule(50, 100) == pytest.approx(0.995)
    assert schedule(25, 100) == pytest.approx(1 - 0.01 * (math.cos(math.pi * 0.25) + 1) / 2)
    assert schedule(100, 100) == 1.0
    assert schedule(150, 100) == 1.0  # a run that is longer than announced
    assert [schedule(step, None) for step in (0, 7, 10**6)] == [0.99] * 3
    values = [schedule(step, 100) for step in range(101)]
    assert values == sorted(values)
    assert all(0.99 <= value <= 1 for value in values)


def test_a_schedule_knows_the_total_that_is_set_later() -> None:
    moco = make(momentum=Cosine(0.5, 1.0))
    assert moco.momentum == 0.5
    moco.total_steps = 2
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    train_step(moco, optimizer)
    assert moco.momentum == pytest.approx(0.75)
    train_step(moco, optimizer)
    assert moco.momentum == 1.0
