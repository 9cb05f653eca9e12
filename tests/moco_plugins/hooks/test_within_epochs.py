"""Every engine keeps checkpoints within epochs as minutes pass, and goes on from them to the same numbers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from moco_plugins import MoCo
from moco_plugins.backbones import ConvNet
from moco_plugins.core.views import AffineViews
from moco_plugins.data.datasets import digits
from moco_plugins.data.loader import EpochBatches, make_loader
from moco_plugins.hooks import manager as plugins
from moco_plugins.hooks.engine import TrainingJob, begins_anywhere

ENGINES = ["lightning", "mmengine"]
CLOCK = {"lightning": "moco_lightly.engine", "mmengine": "moco_mmengine.job"}


class Killed(Exception):
    pass


def build() -> MoCo:
    torch.manual_seed(3)
    return MoCo(ConvNet(1, width=4), 64, queue_size=100, projection_dim=16, momentum=0.99)


def train(engine: str, folder: Path, method: nn.Module, **changes: Any) -> list[tuple[int, float]]:
    steps: list[tuple[int, float]] = []
    job = TrainingJob(
        **{
            "method": method,
            "loader": make_loader(digits(None)[0].subset(range(160)), AffineViews(), lambda x: x, 32, seed=5),
            "epochs": 3,
            "make_optimizer": lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 2e-3),
            "make_scheduler": lambda o, total: torch.optim.lr_scheduler.OneCycleLR(o, 2e-3, total_steps=total),
            "folder": folder,
            "device": "cpu",
            "checkpoint_minutes": 0,
            "on_step": lambda step, loss: steps.append((step, loss)),
            **changes,
        }
    )
    run = plugins.adapter(engine).engine
    assert run is not None
    run(job)
    return steps


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("last", [3, 8, 10])  # 5 steps an epoch: in the first, in the second, at its very end
def test_killed_within_an_epoch_it_goes_on_from_the_last_checkpoint(tmp_path: Path, engine: str, last: int) -> None:
    whole = build()
    expected = train(engine, tmp_path / "whole", whole, checkpoint_minutes=None)

    def stop(step: int, loss: float) -> None:
        if step == last:
            raise Killed

    with pytest.raises(Killed):
        train(engine, tmp_path / "cut", build(), on_step=stop)
    again = build()
    assert train(engine, tmp_path / "cut", again) == expected[last - 1 :]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


@pytest.mark.parametrize("engine", ENGINES)
def test_a_checkpoint_is_kept_when_the_minutes_have_passed_and_not_before(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, kept, steps = [0.0], [], [0]
    monkeypatch.setattr(importlib.import_module(CLOCK[engine]).time, "monotonic", lambda: now[0])

    def on_step(step: int, loss: float) -> None:
        steps[0] = step
        now[0] += 60  # a step takes a minute

    train(engine, tmp_path, build(), checkpoint_minutes=3, on_step=on_step, on_checkpoint=lambda: kept.append(steps[0]))
    assert kept == [3, 8, 13]  # the end of each epoch of 5 steps has a checkpoint of its own


@pytest.mark.parametrize("engine", ENGINES)
def test_what_goes_wrong_before_a_checkpoint_leaves_the_last_one(tmp_path: Path, engine: str) -> None:
    expected = train(engine, tmp_path / "whole", build())
    calls = []

    def full() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        train(engine, tmp_path / "cut", build(), on_checkpoint=full)
    assert train(engine, tmp_path / "cut", build()) == expected[2:]
    assert not list((tmp_path / "cut").glob("*.partial"))


def test_loaders_that_cannot_begin_within_an_epoch_are_known() -> None:
    images = digits(None)[0].subset(range(160))
    assert begins_anywhere(make_loader(images, AffineViews(), lambda x: x, 32, seed=5))
    assert not begins_anywhere(DataLoader(images, 32))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_begins_in_its_middle_has_the_batches_of_the_whole_one(workers: int) -> None:
    images = digits(None)[0].subset(range(96))
    loader = make_loader(images, AffineViews(), lambda x: x, 32, seed=5, workers=workers)
    batches = loader.batch_sampler
    assert isinstance(batches, EpochBatches)
    batches.set_epoch(1)
    whole = list(loader)
    batches.set_epoch(1, 2)
    (rest,) = list(loader)
    assert len(loader) == 3
    assert torch.equal(rest[0][0], whole[2][0][0])
    batches.set_epoch(1)
    assert len(list(loader)) == 3
