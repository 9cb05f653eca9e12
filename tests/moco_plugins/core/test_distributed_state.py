"""What all ranks share: the state at the start, after a load, a resume, a skipped step, bad keys.

``two_ranks`` runs the functions ``on_rank_*`` of this file in two processes; see tests/support/ranks.py.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from joined_batch import (
    batches,
    make,
    share,
)
from ranks import Ranks
from reference import small_backbone, small_views
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from moco_plugins import MoCo


def on_rank_after_a_load(checkpoint: bytes | None) -> dict[str, Any]:
    """Rank 0 alone loads a checkpoint, or the ranks start from states of their own."""
    moco = make(dist.get_rank(), {})
    if checkpoint is not None and dist.get_rank() == 0:
        moco.load_state_dict(torch.load(io.BytesIO(checkpoint), weights_only=True))
    model = DistributedDataParallel(moco)
    moco.train()
    model(share(batches(1, 8)[0], [4, 4], dist.get_rank()))  # states are made equal at the first training step
    return {name: value.clone() for name, value in moco.state_dict().items()}


def trained_state() -> dict[str, Tensor]:
    moco = make(5, {})
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    for views in batches(3, 8):
        moco(views).backward()
        optimizer.step()
        optimizer.zero_grad()
    return moco.state_dict()


def test_initial_state_is_identical_on_all_ranks(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(on_rank_after_a_load, None)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_state_loaded_by_rank_0_reaches_all_ranks(two_ranks: Ranks) -> None:
    file, state = io.BytesIO(), trained_state()
    torch.save(state, file)
    first, second = two_ranks.run(on_rank_after_a_load, file.getvalue())
    for name, value in state.items():
        assert torch.equal(first[name], value), name
        assert torch.equal(second[name], value), name


def on_rank_resume(checkpoint: bytes | None, steps: tuple[int, int], batch_norm: bool) -> dict[str, Any]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    moco = MoCo(small_backbone(batch_norm), 16, "v2+", queue_size=53, projection_dim=8, momentum=0.9).double()
    optimizer_state = None
    if checkpoint is not None:
        saved = torch.load(io.BytesIO(checkpoint), weights_only=True)
        moco.load_state_dict(saved["model"])
        optimizer_state = saved["optimizer"]
    model = DistributedDataParallel(moco)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1, momentum=0.9)
    if optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    for views in batches(steps[1], 10)[steps[0] :]:
        loss = model(share(views, [5, 5], rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"model": moco.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "shuffled BatchNorm"])
def test_two_ranks_resume_bit_identical(two_ranks: Ranks, batch_norm: bool) -> None:
    straight = two_ranks.run(on_rank_resume, None, (0, 8), batch_norm)[0]["model"]
    file = io.BytesIO()
    torch.save(two_ranks.run(on_rank_resume, None, (0, 4), batch_norm)[0], file)
    resumed, _ = two_ranks.run(on_rank_resume, file.getvalue(), (4, 8), batch_norm)
    for name, value in straight.items():
        assert torch.equal(resumed["model"][name], value), name


def on_rank_skipped_step(skip: list[int]) -> dict[str, Any]:
    """One rank overflows; DDP spreads the infinity and all scalers skip."""
    rank = dist.get_rank()
    moco = make(0, {})
    model = DistributedDataParallel(moco)
    optimizer, scaler = torch.optim.SGD(moco.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step, views in enumerate(batches(5, 8)):
        optimizer.zero_grad()
        loss = model(share(views, [4, 4], rank))
        scaler.scale(loss * torch.inf if step in skip and rank == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return {"steps": moco.steps, "filled": int(moco.queue.filled), "keys": moco.queue.keys}


def test_a_step_skipped_because_of_one_rank_is_skipped_on_all(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(on_rank_skipped_step, [0, 2])
    assert first["steps"] == second["steps"] == 3
    assert first["filled"] == second["filled"] == 24
    assert torch.equal(first["keys"], second["keys"])


def on_rank_nonfinite_keys() -> dict[str, Any]:
    rank = dist.get_rank()
    moco = make(0, {"momentum": 1.0})
    optimizer = torch.optim.SGD([moco.query_encoder.projector[0].bias], 0.0)
    views = share(batches(1, 8)[0], [4, 4], rank)
    if rank == 1:
        views[1][2] = torch.nan
    moco(views).backward()
    optimizer.step()
    return {"skipped": int(moco.queue.skipped), "filled": int(moco.queue.filled), "keys": moco.queue.keys}


def test_a_nonfinite_key_of_one_rank_is_turned_away_on_all(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(on_rank_nonfinite_keys)
    assert first["skipped"] == second["skipped"] == 1
    assert first["filled"] == second["filled"] == 7
    assert torch.equal(first["keys"], second["keys"])
    assert torch.isfinite(first["keys"]).all()


def on_rank_evaluate_alone() -> dict[str, Any]:
    """Only rank 0 validates, as many frameworks do: evaluation must not wait for the others."""
    moco = make(0, {"in_batch_negatives": True})
    model = DistributedDataParallel(moco)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    for step, views in enumerate(batches(3, 8)):
        loss = model(share(views, [4, 4], dist.get_rank()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step == 1:
            moco.eval()
            with torch.no_grad():
                moco(small_views(5))
                moco.embed(small_views(5)[0])
                moco.metrics()
            moco.train()
    return {"state": moco.state_dict()}


def test_rank_0_may_evaluate_alone(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(on_rank_evaluate_alone)
    assert all(torch.equal(value, second["state"][name]) for name, value in first["state"].items())


def on_rank_learnable_temperature() -> dict[str, Tensor]:
    moco = make(dist.get_rank(), {"learnable_temperature": True, "variant": "v2+"})
    model = DistributedDataParallel(moco)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    for views in batches(4, 8):
        model(share(views, [4, 4], dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return moco.state_dict()


def test_learnable_temperature_is_the_same_on_all_ranks(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(on_rank_learnable_temperature)
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert float(first["log_temperature"].exp()) != pytest.approx(0.2, abs=1e-4)


def on_rank_count_traffic() -> int:
    """Bytes of the queue that DDP's buffer sync would send at each forward: it must know nothing of the queue."""
    moco = make(0, {})
    DistributedDataParallel(moco)
    return sum(buffer.numel() for buffer in moco.buffers())


def test_ddp_does_not_sync_the_queue_at_every_forward(two_ranks: Ranks) -> None:
    assert two_ranks.run(on_rank_count_traffic) == [0, 0]
