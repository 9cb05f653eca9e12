"""Two processes are one process on the joined batch: loss, gradient, queue, key encoder.

``two_ranks`` runs the functions ``on_rank_*`` of this file in two processes; see tests/support/ranks.py.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Ranks
from reference import PlainMoCo, small_backbone, small_views
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moco_plugins import MoCo

Options = dict[str, Any]


def make(seed: int, options: Options) -> MoCo:
    torch.manual_seed(seed)
    options = {"queue_size": 53, "projection_dim": 8, "momentum": 0.9, **options}
    return MoCo(small_backbone(), 16, **options).double()


def batches(steps: int, size: int) -> list[list[Tensor]]:
    torch.manual_seed(99)
    return [small_views(size) for _ in range(steps)]


def share(views: Sequence[Tensor], sizes: Sequence[int], rank: int) -> list[Tensor]:
    return [view.split(list(sizes))[rank] for view in views]


@contextlib.contextmanager
def no_sync(model: nn.Module, wanted: bool) -> Iterator[None]:
    with model.no_sync() if wanted and isinstance(model, DistributedDataParallel) else contextlib.nullcontext():
        yield


def on_rank_train(options: Options, ddp: Options | None, sizes: list[int], parts: int, steps: int) -> dict[str, Any]:
    """Train; each rank starts from a random state of its own, as careless scripts do."""
    rank = dist.get_rank()
    moco = make(rank, options)
    if ddp is None or ddp.get("broadcast_buffers") is False:
        for tensor in moco.query_encoder.state_dict().values():  # the framework's part, where it does not do it
            dist.broadcast(tensor, 0)
        if moco.predictor is not None:
            for tensor in moco.predictor.state_dict().values():
                dist.broadcast(tensor, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch renames broadcast_buffers
        model = DistributedDataParallel(moco, **ddp) if ddp is not None else moco
    optimizer = torch.optim.SGD(moco.parameters(), 0.1, momentum=0.9)
    losses = []
    for views in batches(steps, sum(sizes)):
        mine = share(views, sizes, rank)
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        chunks = list(zip(*(view.tensor_split(parts) for view in mine), strict=True))
        for number, chunk in enumerate(chunks):
            with no_sync(model, number < parts - 1):
                # DDP takes the mean over ranks: weigh a rank by its share of the images.
                loss = model(chunk) * (len(chunk[0]) * len(sizes) / sum(sizes))
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(float(total) / len(sizes))
        if ddp is None:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= len(sizes)
        gradient = [p.grad.clone() for p in moco.query_encoder.parameters() if p.grad is not None]
        optimizer.step()
    return {
        "losses": losses,
        "gradient": gradient,
        "query": [p.detach() for p in moco.query_encoder.parameters()],
        "key": [p.detach() for p in moco.key_encoder.parameters()],
        "queue": moco.queue.keys if moco.queue is not None else torch.zeros(0),
        "ptr": int(moco.queue.ptr) if moco.queue is not None else 0,
        "filled": int(moco.queue.filled) if moco.queue is not None else 0,
        "steps": moco.steps,
    }


def one_process(options: Options, sizes: list[int], steps: int) -> dict[str, Any]:
    moco = make(0, options)
    plain = PlainMoCo(
        moco.query_encoder,
        moco.key_encoder,
        moco.queue.keys if moco.queue is not None else None,
        momentum=0.9,
        temperature=0.2,
        symmetric=moco.settings.symmetric,
        in_batch_negatives=moco.settings.in_batch_negatives,
        predictor=moco.predictor,
    )
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    losses = [plain.train_step(views, optimizer) for views in batches(steps, sum(sizes))]
    gradient = [p.grad.clone() for p in plain.query_encoder.parameters() if p.grad is not None]
    plain.move_key_encoder()
    return {"losses": losses, "gradient": gradient, "plain": plain}


def assert_equal_to_one_process(results: list[dict[str, Any]], expected: dict[str, Any], steps: int) -> None:
    plain: PlainMoCo = expected["plain"]
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=1e-9)
        for ours, theirs in zip(result["gradient"], expected["gradient"], strict=True):
            assert torch.allclose(ours, theirs, atol=1e-9)
        for ours, theirs in zip(result["query"], plain.query_encoder.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-9)
        for ours, theirs in zip(result["key"], plain.key_encoder.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-9)
        if result["queue"].numel():
            assert torch.allclose(result["queue"], plain.queue, atol=1e-9)
            assert result["ptr"] == plain.pointer
        assert result["steps"] == steps
    assert torch.equal(results[0]["queue"], results[1]["queue"])
    assert all(torch.equal(a, b) for a, b in zip(results[0]["key"], results[1]["key"], strict=True))


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


def on_rank_sharded(kind: str, parts: int, sizes: list[int], steps: int) -> dict[str, Any]:
    """Optimiser state or the parameters themselves are shared out among the ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

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


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["fully_shard", "ZeroRedundancyOptimizer"])
def test_sharded_training_equals_one_process(two_ranks: Ranks, kind: str, parts: int) -> None:
    results = two_ranks.run(on_rank_sharded, kind, parts, [8, 8], 5)
    assert_equal_to_one_process(results, {**one_process({}, [8, 8], 5), "gradient": []}, 5)


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


def test_a_process_without_group_needs_no_flag() -> None:
    assert not dist.is_initialized()
    for gather in (True, False):
        moco = make(0, {"gather_distributed": gather, "in_batch_negatives": True})
        optimizer = torch.optim.SGD(moco.parameters(), 0.1)
        moco(small_views(4)).backward()
        optimizer.step()
        assert int(moco.queue.filled) == 4
