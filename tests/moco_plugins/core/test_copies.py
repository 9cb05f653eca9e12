"""A MoCo can be copied, pickled and cast at any time, and goes on right."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from reference import small_backbone, small_views
from torch import nn
from training import assert_same, changed, keys_now, make, snapshot, train_step

from moco_plugins import MoCo


def through_pickle(moco: MoCo) -> MoCo:
    return pickle.loads(pickle.dumps(moco))


@pytest.mark.parametrize("carry", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("when", ["at the start", "after a step", "after forward", "after backward"])
def test_a_copy_goes_on_by_itself(carry: Callable[[MoCo], MoCo], when: str) -> None:
    moco = make()
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    if when != "at the start":
        train_step(moco, optimizer, small_views(6))
    optimizer.zero_grad()
    if when == "after forward":
        loss = moco(small_views(6))
    elif when == "after backward":
        moco(small_views(6)).backward()
    other = carry(moco)
    assert_same(moco, other)
    started, filled, original = other.steps, int(other.queue.filled), snapshot(moco)

    # What the original has staged belongs to the original: its gradient is not in the copy.
    views = small_views(5)
    keys = keys_now(other, views[1])
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    train_step(other, theirs, views)
    assert other.steps == started + 1
    assert int(other.queue.filled) == filled + 5
    assert torch.allclose(other.queue.ordered()[-5:], keys, atol=1e-12)
    assert not changed(moco, original)

    if when == "after forward":
        loss.backward()
    if when in ("after forward", "after backward"):
        optimizer.step()
        assert moco.steps == 2
        assert int(moco.queue.filled) == 12
    assert other.steps == started + 1


def test_copies_do_not_keep_the_original_alive_and_dead_models_are_forgotten() -> None:
    moco = make()
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    train_step(moco, optimizer, small_views(6))
    other, gone = copy.deepcopy(moco), weakref.ref(moco)
    del moco, optimizer
    gc.collect()
    assert gone() is None
    train_step(other, torch.optim.SGD(other.parameters(), 0.1), small_views(6))  # the dead one is no trouble
    assert other.steps == 2


def test_optimisers_step_while_models_die() -> None:
    survivor = make()
    optimizer = torch.optim.SGD(survivor.parameters(), 0.1)
    for _ in range(20):
        make()
        train_step(survivor, optimizer, small_views(4))
    assert survivor.steps == 20


def casts() -> Iterator[tuple[str, Callable[[MoCo], MoCo], torch.dtype]]:
    yield "float", lambda m: m.float(), torch.float32
    yield "double", lambda m: m.double(), torch.float64
    yield "bfloat16", lambda m: m.bfloat16(), torch.bfloat16
    yield "to", lambda m: m.to("cpu", torch.float32), torch.float32


@pytest.mark.parametrize(("name", "cast", "dtype"), list(casts()), ids=lambda value: value if str(value) else None)
def test_training_goes_on_after_a_move_to_another_dtype(
    name: str, cast: Callable[[MoCo], MoCo], dtype: torch.dtype
) -> None:
    moco = MoCo(small_backbone(), 16, queue_size=40, projection_dim=8, momentum=0.9)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    train_step(moco, optimizer, small_views(6, torch.float32))
    before = moco.queue.ordered().clone()
    moco = cast(moco)
    assert torch.allclose(moco.queue.ordered().float(), before, atol=1e-7)
    views = small_views(6, dtype)
    assert torch.isfinite(torch.tensor(train_step(moco, optimizer, views)))
    assert moco.steps == 2
    assert int(moco.queue.filled) == 12
    assert moco.queue.keys.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_new_parts_take_the_place_and_precision_of_the_backbone(dtype: torch.dtype) -> None:
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(12, 8)).to(dtype)
    moco = MoCo(backbone, 8, "v2+", queue_size=16, projection_dim=4, predictor=True)
    assert all(p.dtype == dtype for p in moco.parameters())
    assert moco.queue.keys.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    moco([torch.randn(2, 12, dtype=dtype), torch.randn(2, 12, dtype=dtype)]).backward()
