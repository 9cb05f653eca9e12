"""Ranks exchange key images, so that query and key never share BatchNorm statistics; keys come back in order."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Ranks
from reference import small_backbone, small_views
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moco_plugins import MoCo


def make(backbone: nn.Module | None = None, **options: Any) -> MoCo:
    backbone = backbone or small_backbone(batch_norm=True)
    return MoCo(backbone, 16, **{"queue_size": 64, "projection_dim": 8, "momentum": 0.9, **options})


def rank_images(n: int = 16) -> Tensor:
    """A brightness for each rank, which shared statistics would give away."""
    torch.manual_seed(5)
    everyone = torch.randn(2 * n, 3, 2, 2)
    everyone[n:] += 4
    return everyone


def on_rank_statistics(shuffle: bool, sizes: list[int]) -> dict[str, Any]:
    torch.manual_seed(0)
    moco = make(shuffle_bn=shuffle)
    start, rank = copy.deepcopy(moco.key_encoder), dist.get_rank()
    mine = rank_images(sum(sizes) // 2).split(sizes)[rank]
    moco([mine + 0.1 * torch.randn_like(mine), mine]).backward()
    torch.optim.SGD(moco.parameters(), 0.0).step()
    norm = moco.key_encoder.backbone[2]
    with torch.no_grad():
        hidden = start.backbone[1](mine.flatten(1))
    return {
        "mean": norm.running_mean / 0.1,  # the batch mean: running statistics begin at 0, with momentum 0.1
        "own mean": hidden.mean(0),
        "keys": moco.queue.ordered(),
    }


def test_ranks_exchange_images_so_that_statistics_mix(two_ranks: Ranks) -> None:
    plain, shuffled = (two_ranks.run(on_rank_statistics, shuffle, [16, 16]) for shuffle in (False, True))
    for result in plain:
        assert torch.allclose(result["mean"], result["own mean"], atol=1e-4)
    gap = float((plain[0]["own mean"] - plain[1]["own mean"]).norm())
    assert float((shuffled[0]["mean"] - shuffled[1]["mean"]).norm()) < 0.5 * gap
    both = (plain[0]["own mean"] + plain[1]["own mean"]) / 2
    assert torch.allclose((shuffled[0]["mean"] + shuffled[1]["mean"]) / 2, both, atol=1e-4)  # each image went once


def on_rank_order(sizes: list[int], variant: str, parts: int, queue_size: int) -> dict[str, Any]:
    """A key encoder in which BatchNorm is there and does nothing: only the order of the keys can be wrong."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.BatchNorm1d(16))
    moco = make(backbone, shuffle_bn=True, momentum=1.0, variant=variant, queue_size=queue_size)
    moco.key_encoder.backbone[2].eval()
    moco.key_encoder.backbone[2].train = lambda mode=True: moco.key_encoder.backbone[2]
    model = DistributedDataParallel(moco)
    torch.manual_seed(1)
    wanted = []
    optimizer = torch.optim.SGD(moco.parameters(), 0.0)
    for _ in range(3):
        everyone = [torch.randn(sum(sizes), 3, 2, 2) for _ in range(2)]
        mine = [view.split(sizes)[dist.get_rank()] for view in everyone]
        for chunk in zip(*(view.tensor_split(parts) for view in mine), strict=True):
            model(chunk).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            halves = everyone if variant == "v2+" else everyone[1:]
            wanted += [F.normalize(moco.key_encoder(half), dim=1) for half in halves]
    return {"keys": moco.queue.ordered(), "wanted": torch.cat(wanted)[-queue_size:]}


@pytest.mark.parametrize("variant", ["v2", "v2+"])
@pytest.mark.parametrize(
    ("sizes", "parts", "queue_size"),
    [
        ([8, 8], 1, 256),
        ([9, 5], 1, 256),
        ([8, 8], 2, 256),
        ([20, 9], 4, 7),  # more is accumulated than the queue holds, on one rank only
    ],
    ids=str,
)
def test_keys_come_back_to_their_queries_in_order(
    two_ranks: Ranks, sizes: list[int], parts: int, queue_size: int, variant: str
) -> None:
    for result in two_ranks.run(on_rank_order, sizes, variant, parts, queue_size):
        assert torch.allclose(result["keys"], result["wanted"], atol=1e-5)


def test_every_forward_pass_of_an_accumulated_step_has_a_permutation_of_its_own() -> None:
    moco, views = make(queue_size=8, momentum=1.0), small_views(32, torch.float32)
    losses = {float(moco(views).detach()) for _ in range(6)}  # the same images, in other groups
    assert len(losses) == 6


def on_rank_warnings(kind: str) -> list[str]:
    torch.manual_seed(0)
    moco = make(shuffle_bn=kind != "off")
    if kind in ("synced", "off"):
        # torch's SyncBatchNorm itself fails without a GPU; by then the warning must be out.
        moco.key_encoder = nn.SyncBatchNorm.convert_sync_batchnorm(moco.key_encoder)
        moco.query_encoder = nn.SyncBatchNorm.convert_sync_batchnorm(moco.query_encoder)
    with warnings.catch_warnings(record=True) as caught, contextlib.suppress(ValueError, RuntimeError):
        warnings.simplefilter("always")
        moco(small_views(8, torch.float32))
    return [str(warning.message) for warning in caught if "shuffle" in str(warning.message)]


def test_sync_batch_norm_is_named_on_rank_0(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(on_rank_warnings, "synced")
    assert len(first) == 1
    assert "backbone.2" in first[0]
    assert "SyncBatchNorm" in first[0]
    assert "shuffle_bn=False" in first[0]
    assert second == []
    assert two_ranks.run(on_rank_warnings, "plain") == [[], []]
    assert two_ranks.run(on_rank_warnings, "off") == [[], []]
