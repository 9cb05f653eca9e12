"""Two processes are one process on the joined batch: loss, gradient, queue, key encoder.

``two_ranks`` runs the functions ``on_rank_*`` of this file in two processes; see tests/support/ranks.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from joined_batch import (
    Options,
    assert_equal_to_one_process,
    batches,
    make,
    on_rank_train,
    one_process,
    share,
)
from ranks import Ranks
from reference import small_views
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moco_plugins.core.batchnorm import encode_shuffled

CASES: dict[str, tuple[Options, Options | None, list[int], int]] = {
    "default flags": ({}, {}, [6, 6], 1),
    "v1": ({"variant": "v1", "temperature": 0.2}, {}, [6, 6], 1),
    "buffer sync off": ({}, {"broadcast_buffers": False}, [6, 6], 1),
    "symmetric": ({"variant": "v2+"}, {}, [6, 6], 1),
    "symmetric, buffer sync off": ({"variant": "v2+"}, {"broadcast_buffers": False}, [6, 6], 1),
    "accumulating": ({}, {}, [12, 12], 3),
    "symmetric, accumulating": ({"variant": "v2+"}, {}, [12, 12], 3),
    "batch negatives": ({"in_batch_negatives": True}, {}, [6, 6], 1),
    "batch negatives, symmetric, uneven": ({"variant": "v2+", "in_batch_negatives": True}, {}, [5, 8], 1),
    "uneven": ({}, {}, [7, 3], 1),
    "uneven, accumulating": ({}, {}, [11, 6], 2),
    "joined batch larger than the queue": ({"queue_size": 7}, {}, [6, 6], 1),
    "no DDP": ({}, None, [6, 6], 1),
    "gradient as bucket view": ({}, {"gradient_as_bucket_view": True}, [6, 6], 1),
    "gradient as bucket view, accumulating": ({}, {"gradient_as_bucket_view": True}, [12, 12], 3),
    "static graph": ({"variant": "v2+"}, {"static_graph": True}, [6, 6], 1),
}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_equal_one_on_the_joined_batch(two_ranks: Ranks, case: str) -> None:
    options, ddp, sizes, parts = CASES[case]
    results = two_ranks.run(on_rank_train, options, ddp, sizes, parts, 8)
    assert_equal_to_one_process(results, one_process(options, sizes, 8), 8)


def test_v3_without_batch_norm_in_the_heads(two_ranks: Ranks) -> None:
    options = {"variant": "v3", "momentum": 0.9, "hidden_dim": 12, "head_batch_norm": False, "queue_size": 0}
    results = two_ranks.run(on_rank_train, options, {}, [6, 6], 1, 8)
    assert_equal_to_one_process(results, one_process(options, [6, 6], 8), 8)


def on_rank_train_in_ddps_debug_mode(*arguments: Any) -> dict[str, Any]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        return on_rank_train(*arguments)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


DEBUGGED = ("symmetric", "uneven, accumulating", "batch negatives, symmetric, uneven")


@pytest.mark.parametrize("case", DEBUGGED)
def test_no_complaint_in_ddps_debug_mode(two_ranks: Ranks, case: str) -> None:
    # It turns unused parameters and in-place changes of the graph into errors with names.
    options, ddp, sizes, parts = CASES[case]
    results = two_ranks.run(on_rank_train_in_ddps_debug_mode, options, ddp, sizes, parts, 4)
    assert_equal_to_one_process(results, one_process(options, sizes, 4), 4)


def on_rank_bare_ddp() -> None:
    DistributedDataParallel(nn.Linear(2, 2))(torch.randn(2, 2)).sum().backward()


def test_no_complaint_in_torchs_whole_debug_mode() -> None:
    # Set from the start it also checks that all ranks take part in the same collectives.
    with Ranks(2, TORCH_DISTRIBUTED_DEBUG="DETAIL") as ranks:
        for case in DEBUGGED:
            options, _, sizes, _ = CASES[case]
            results = ranks.run(on_rank_train, options, None, sizes, 1, 4)
            assert_equal_to_one_process(results, one_process(options, sizes, 4), 4)
        try:
            ranks.run(on_rank_bare_ddp)
        except AssertionError:
            pytest.skip(f"without DDP all is well, but torch {torch.__version__} crashes here in a bare DDP")
        for case in DEBUGGED:
            options, ddp, sizes, parts = CASES[case]
            results = ranks.run(on_rank_train, options, ddp, sizes, parts, 4)
            assert_equal_to_one_process(results, one_process(options, sizes, 4), 4)


def test_three_processes() -> None:
    with Ranks(3) as ranks:
        results = ranks.run(on_rank_train, {"variant": "v2+"}, {}, [4, 3, 2], 1, 5)
    assert_equal_to_one_process(results, one_process({"variant": "v2+"}, [4, 3, 2], 5), 5)


def on_rank_queue_contents(gather: bool, sync: bool, sizes: list[int]) -> dict[str, Any]:
    """A key encoder that never moves, so that the keys can be known beforehand."""
    rank = dist.get_rank()
    moco = make(rank, {"gather_distributed": gather, "momentum": 1.0, "queue_size": 24})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = DistributedDataParallel(moco, broadcast_buffers=sync)
    optimizer = torch.optim.SGD(moco.query_encoder.parameters(), 0.05)
    addresses, start = [moco.queue.keys.data_ptr()], moco.queue.keys.clone()
    expected = []
    for views in batches(3, sum(sizes)):
        mine = share(views, sizes, rank)
        model(mine).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            images = views[1] if gather else mine[1]
            expected.append(F.normalize(moco.key_encoder(images), dim=1))
        addresses.append(moco.queue.keys.data_ptr())
    return {
        "ordered": moco.queue.ordered(),
        "expected": torch.cat(expected)[-24:],
        "keys": moco.queue.keys,
        "start": start,
        "moved": len(set(addresses)) > 1,
        "key": [p.detach() for p in moco.key_encoder.parameters()],
    }


@pytest.mark.parametrize("sync", [True, False], ids=["buffer sync on", "buffer sync off"])
@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "local"])
@pytest.mark.parametrize("sizes", [[4, 4], [3, 6]], ids=str)
def test_what_the_queues_of_two_ranks_hold(two_ranks: Ranks, gather: bool, sync: bool, sizes: list[int]) -> None:
    first, second = two_ranks.run(on_rank_queue_contents, gather, sync, sizes)
    for result in (first, second):
        assert torch.allclose(result["ordered"], result["expected"], atol=1e-12)
        assert not result["moved"]
    assert torch.equal(first["keys"], second["keys"]) is gather
    assert all(torch.equal(a, b) for a, b in zip(first["key"], second["key"], strict=True))
    if not gather:  # each rank began with random rows of its own, and keeps those not yet replaced
        assert not torch.equal(first["start"], second["start"])
        assert torch.equal(second["keys"][-1], second["start"][-1])


def on_rank_sharded(kind: str, parts: int, sizes: list[int], steps: int) -> dict[str, Any]:
    """Optimiser state or the parameters themselves are shared out among the ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    warnings.filterwarnings("error", "no optimiser that has stepped")  # all parameters are owned, on whichever rank
    rank = dist.get_rank()
    moco = make(0, {})
    model: nn.Module = moco
    if kind == "fully_shard":
        fully_shard(moco)
        optimizer = torch.optim.SGD(moco.parameters(), 0.1, momentum=0.9)
    else:
        model = DistributedDataParallel(moco)
        optimizer = ZeroRedundancyOptimizer(moco.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    losses = []
    for views in batches(steps, sum(sizes)):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for chunk in zip(*(view.tensor_split(parts) for view in share(views, sizes, rank)), strict=True):
            loss = model(chunk) / parts
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(float(total) / len(sizes))
        optimizer.step()

    def whole(parameters: Iterable[Tensor]) -> list[Tensor]:
        return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in parameters]

    return {
        "losses": losses,
        "gradient": [],
        "query": whole(moco.query_encoder.parameters()),
        "key": whole(moco.key_encoder.parameters()),
        "queue": moco.queue.keys,
        "ptr": int(moco.queue.ptr),
        "steps": moco.steps,
    }


#: In torch 2.6 fully_shard itself fails on a CPU: its streams there have no events.
_NEEDS_GPU = pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="fully_shard needs a GPU in torch 2.6")


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", [pytest.param("fully_shard", marks=_NEEDS_GPU), "ZeroRedundancyOptimizer"])
def test_sharded_training_equals_one_process(two_ranks: Ranks, kind: str, parts: int) -> None:
    results = two_ranks.run(on_rank_sharded, kind, parts, [8, 8], 5)
    assert_equal_to_one_process(results, {**one_process({}, [8, 8], 5), "gradient": []}, 5)


def test_a_process_without_group_needs_no_flag() -> None:
    assert not dist.is_initialized()
    for gather in (True, False):
        moco = make(0, {"gather_distributed": gather, "in_batch_negatives": True})
        optimizer = torch.optim.SGD(moco.parameters(), 0.1)
        moco(small_views(4)).backward()
        optimizer.step()
        assert int(moco.queue.filled) == 4


class SumOfBoth(nn.Module):
    """BatchNorm over rows that come in two parts, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, rows: dict[str, Any]) -> torch.Tensor:
        return self.norm(rows["a"] + rows["b"]["c"])


def on_rank_exchange_nested(sizes: list[int]) -> list[torch.Tensor]:
    rank = dist.get_rank()
    rows = torch.randn(sizes[rank], 4, generator=torch.Generator().manual_seed(rank))
    nested = encode_shuffled(SumOfBoth(), {"a": rows * 0.25, "b": {"c": rows * 0.75}}, seed=3)
    return [nested, encode_shuffled(nn.BatchNorm1d(4), rows, seed=3), nn.BatchNorm1d(4)(rows).detach()]


def test_parts_of_nested_views_are_exchanged_alike(two_ranks: Ranks) -> None:
    for nested, plain, own in two_ranks.run(on_rank_exchange_nested, [6, 6]):
        torch.testing.assert_close(nested, plain)
        assert not torch.allclose(plain, own, atol=1e-2)  # other images' statistics
