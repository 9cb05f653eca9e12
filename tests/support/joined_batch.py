"""Training on several ranks, and by the plain reference on the joined batch, to compare the two."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
