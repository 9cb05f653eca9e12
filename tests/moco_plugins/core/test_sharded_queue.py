"""A queue shared out among ranks is the whole queue: losses, gradients, state, on any number of ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from reference import small_backbone
from torch import Tensor

from moco_plugins import MoCo
from moco_plugins.core.sharded_queue import ShardedKeyQueue
from moco_plugins.steps import distributed

COLUMNS = {"label": "long", "id": "long"}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def build(gather: str, options: dict[str, Any]) -> MoCo:
    torch.manual_seed(0)
    settings = {"queue_size": 37, "projection_dim": 8, "hidden_dim": 16, "momentum": 0.9, **options}
    return MoCo(small_backbone(), 16, gather=gather, **settings).double()


def batch(step: int, rank: int) -> tuple[list[Tensor], Tensor, Tensor]:
    n = ((5, 8, 3), (4, 8, 11))[rank][step % 3]  # ranks differ
    generator = torch.Generator().manual_seed(100 * step + rank)
    views = [torch.randn(n, 3, 2, 2, generator=generator, dtype=torch.float64) for _ in range(2)]
    ids = torch.randint(-1, 20, (n,), generator=generator)
    return views, ids % 3, ids


def train_both(options: dict[str, Any], steps: int = 6) -> list[float]:
    """Differences between a shared-out and a whole queue: loss, gradient, weights; and the rows that are here."""
    pair = [build(gather, options) for gather in ("sharded", "whole")]
    optimizers = [torch.optim.SGD(moco.parameters(), 0.1) for moco in pair]
    worst = 0.0
    for step in range(steps):
        views, labels, ids = batch(step, dist.get_rank())
        losses, gradients = [], []
        for moco, optimizer in zip(pair, optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = moco(views, labels=labels, ids=ids)
            loss.backward()
            losses.append(float(loss.detach()))
            gradients.append(torch.cat([p.grad.flatten() for p in moco.query_encoder.parameters()]))
            for p in moco.query_encoder.parameters():  # as DDP does
                dist.all_reduce(p.grad)
            optimizer.step()
        worst = max(worst, abs(losses[0] - losses[1]), float((gradients[0] - gradients[1]).abs().max()))
    states = [moco.state_dict() for moco in pair]
    assert states[0].keys() == states[1].keys()
    worst = max(worst, *(float((states[0][n] - states[1][n]).abs().max()) for n in states[0]))
    return [worst, pair[0].queue.rows]


@pytest.mark.parametrize(
    ("loss", "fill"),
    [*((name, "random") for name in ("info_nce", "decoupled", "hard", "ressl", "supcon")), ("debiased", "empty")],
)
def test_two_ranks_with_a_shared_queue_equal_two_with_a_whole_one(two: Ranks, loss: str, fill: str) -> None:
    options = {"loss": loss, "queue_fill": fill, "queue_options": {"columns": COLUMNS}}
    if fill == "empty":
        options["in_batch_negatives"] = True  # at first there is nothing else
    (worst, here), (worst_other, there) = two.run(train_both, options)
    assert max(worst, worst_other) < 1e-6
    assert here + there == 37
    assert abs(here - there) <= 1


def _train(moco: MoCo, steps: int = 4, first: int = 0) -> MoCo:
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    for step in range(first, first + steps):
        views, labels, ids = batch(step, distributed.rank())
        moco(views, labels=labels, ids=ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return moco


def save_here() -> dict[str, Tensor]:
    return copy.deepcopy(_train(build("sharded", {"queue_options": {"columns": COLUMNS}})).state_dict())


def load_there(state: dict[str, Tensor]) -> tuple[float, Tensor]:
    """Resume: the loss of the next step, and what is saved again at once, by a queue in use and by a new one."""
    used = _train(build("sharded", {"queue_options": {"columns": COLUMNS}}), first=50)
    new = build("sharded", {"queue_options": {"columns": COLUMNS}})
    for moco in (used, new):
        moco.load_state_dict(state)
        for name, value in moco.state_dict().items():
            assert torch.equal(value, state[name]), name
    views, labels, ids = batch(7, distributed.rank())
    return float(new(views, labels=labels, ids=ids).detach()), new.state_dict()["queue.keys"]


def whole_loss(state: dict[str, Tensor], rank: int) -> float:
    moco = build("whole", {"queue_options": {"columns": COLUMNS}})
    moco.load_state_dict(state)
    views, labels, ids = batch(7, rank)
    return float(moco(views, labels=labels, ids=ids).detach())


def test_checkpoint_holds_all_shards_and_loads_on_another_number_of_ranks(two: Ranks) -> None:
    first, second = two.run(save_here)
    assert first["queue.keys"].shape == (37, 8)
    assert all(torch.equal(first[name], second[name]) for name in first if name.startswith("queue"))
    with Ranks(3) as three:
        results = three.run(load_three, first)
    for rank, (loss, keys) in enumerate(results):
        assert torch.equal(keys, first["queue.keys"])
        assert loss == pytest.approx(whole_loss(first, min(rank, 1)), abs=1e-9)


def load_three(state: dict[str, Tensor]) -> tuple[float, Tensor]:
    new = build("sharded", {"queue_options": {"columns": COLUMNS}})
    new.load_state_dict(state)
    views, labels, ids = batch(7, min(distributed.rank(), 1))
    loss = float(new(views, labels=labels, ids=ids).detach())
    assert new.queue.rows in (12, 13)
    return loss, new.state_dict()["queue.keys"]


def test_resume_on_as_many_ranks_goes_on_alike(two: Ranks) -> None:
    state, _ = two.run(save_here)
    for rank, (loss, keys) in enumerate(two.run(load_there, state)):
        assert torch.equal(keys, state["queue.keys"])
        assert loss == pytest.approx(whole_loss(state, rank), abs=1e-9)


def loss_and_refusals() -> str:
    moco = build("sharded", {"loss": "mochi"})
    try:
        _train(moco, 1)
    except ValueError as error:
        return str(error)
    return ""


def test_mochi_needs_the_whole_queue_and_says_so(two: Ranks) -> None:
    for message in two.run(loss_and_refusals):
        assert "gather='whole'" in message


def test_sharded_without_a_process_group_is_named_with_the_cure() -> None:
    moco = build("sharded", {})
    views, _, _ = batch(0, 0)
    assert torch.isfinite(moco.eval()(views))
    with pytest.raises(RuntimeError, match=r"gather='sharded'.*no process group.*torchrun"):
        moco.train()(views)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"gather": "some"}, "gather='some' must be"), ({"gather": "sharded", "queue": "mine"}, "queue='mine'")],
)
def test_bad_gather(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoCo(small_backbone(), 16, queue_size=8, **options)


def test_a_part_has_no_order() -> None:
    queue = ShardedKeyQueue(8, 4)
    assert queue.ordered().shape == (0, 4)
    queue.shared = True
    with pytest.raises(RuntimeError, match="state_dict"):
        queue.ordered()
