"""What is looked at before the first step: frozen backbones, wrappers that cannot be right."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from reference import small_backbone, small_views
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import make, train_step

from moco_plugins import MoCo
from moco_plugins.core.queue_loss import QueueLoss


def test_a_backbone_that_is_wholly_frozen_is_named() -> None:
    moco = make()
    moco.query_encoder.backbone.requires_grad_(False)
    optimizer = torch.optim.SGD(moco.query_encoder.projector.parameters(), 0.1)

    def train() -> None:
        for _ in range(5):
            train_step(moco, optimizer, small_views(6))

    with pytest.warns(UserWarning, match=r"backbone \(Sequential\) has requires_grad.*head alone") as caught:
        train()
    assert len(caught) == 1
    moco = make()
    moco.query_encoder.backbone[1].requires_grad_(False)  # a part
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moco(small_views(6))
        MoCo(nn.Flatten(), 12, queue_size=8)(small_views(6, torch.float32))  # nothing to freeze


def raised(function: Any) -> str:
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


def on_rank_fsdp1(where: str) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    warnings.simplefilter("ignore")
    moco = MoCo(small_backbone(), 16, queue_size=40, projection_dim=8)
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    model: nn.Module = moco
    if where == "around":
        model = FullyShardedDataParallel(moco, **options)
    else:
        moco.query_encoder.backbone = FullyShardedDataParallel(moco.query_encoder.backbone, **options)
    return raised(lambda: model(small_views(6, torch.float32)))


@pytest.mark.parametrize("where", ["around", "within"])
def test_fsdp_of_the_first_version_is_refused_on_all_ranks(two_ranks: Ranks, where: str) -> None:
    for message in two_ranks.run(on_rank_fsdp1, where):
        assert "fully_shard(moco), version 2, or DistributedDataParallel" in message


def on_rank_join(kind: str, ends: bool) -> tuple[str, int]:
    torch.manual_seed(0)
    encoder = nn.Linear(8, 8)
    criterion = QueueLoss(20, 8)
    moco = MoCo(
        small_backbone(), 16, queue_size=40, projection_dim=8, gather_distributed="own" not in kind, shuffle_bn=False
    )
    model = DistributedDataParallel(encoder if kind == "loss" else moco)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps = 0

    def train() -> None:
        nonlocal steps
        with model.join(throw_on_early_termination=ends):
            for _ in range(3 + 2 * dist.get_rank()):  # the second rank has more batches
                if kind == "loss":
                    loss = criterion(model(torch.randn(4, 8)), torch.randn(4, 8))
                else:
                    loss = model(small_views(6, torch.float32))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                steps += 1

    return raised(train), steps


@pytest.mark.parametrize("kind", ["moco", "loss"])
def test_uneven_batches_in_join_are_refused_on_all_ranks_before_anyone_waits(two_ranks: Ranks, kind: str) -> None:
    for message, steps in two_ranks.run(on_rank_join, kind, False):
        assert "join() context" in message
        assert "throw_on_early_termination=True" in message
        assert steps == 0


@pytest.mark.parametrize("kind", ["moco", "loss"])
def test_join_that_ends_all_ranks_together_works(two_ranks: Ranks, kind: str) -> None:
    results = two_ranks.run(on_rank_join, kind, True)
    assert [steps for _, steps in results] == [3, 3]
    assert all("join() context" not in message for message, _ in results)


def test_join_works_where_ranks_exchange_nothing(two_ranks: Ranks) -> None:
    assert [steps for _, steps in two_ranks.run(on_rank_join, "moco with queues of its own", False)] == [3, 5]


def on_rank_sharded_loss(kind: str, parts: int) -> tuple[int, torch.Tensor, list[str]]:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    criterion = QueueLoss(64, 8, fill="empty")
    model: nn.Module = encoder
    if kind == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        fully_shard(encoder)
    elif kind.startswith("FSDP1"):
        from torch.distributed.fsdp import FullyShardedDataParallel

        options = {"use_orig_params": "original" in kind, "device_id": torch.device("cpu")}
        model = FullyShardedDataParallel(encoder, **options)
    else:
        model = DistributedDataParallel(encoder)
    probe = torch.optim.SGD(nn.Linear(8, 3).parameters(), 0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(parts):
                x, key = torch.randn(2, 4, 8, generator=generator)
                (criterion(model(x), key) / parts).backward()
            probe.step()  # of something else
            optimizer.step()
    told = [str(w.message) for w in caught if "QueueLoss" in str(w.message)]
    return int(criterion.queue.filled), criterion.queue.ordered(), told


_NEEDS_GPU = pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="fully_shard needs a GPU in torch 2.6")


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", [pytest.param("fully_shard", marks=_NEEDS_GPU), "FSDP1", "FSDP1 with original ones"])
def test_the_queue_of_a_loss_follows_a_sharded_encoder(two_ranks: Ranks, kind: str, parts: int) -> None:
    expected = two_ranks.run(on_rank_sharded_loss, "DDP", parts)
    for (filled, keys, told), (_, keys_of_ddp, _) in zip(
        two_ranks.run(on_rank_sharded_loss, kind, parts), expected, strict=True
    ):
        assert filled == 3 * parts * 8
        assert torch.equal(keys, keys_of_ddp)
        assert told == []
