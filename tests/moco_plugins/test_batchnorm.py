"""Query and key of an image never share BatchNorm statistics: exchanged between ranks, split in one process."""

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
from moco_plugins.batchnorm import SplitBatchNorm, encode_split, groups_for


def make(backbone: nn.Module | None = None, **options: Any) -> MoCo:
    backbone = backbone or small_backbone(batch_norm=True)
    return MoCo(backbone, 16, **{"queue_size": 64, "projection_dim": 8, "momentum": 0.9, **options})


def staged_keys(moco: MoCo, views: list[Tensor]) -> Tensor:
    """The keys of one training step, as they stand in the queue afterwards."""
    optimizer = torch.optim.SGD(moco.parameters(), 0.0)
    moco(views).backward()
    optimizer.step()
    optimizer.zero_grad()
    return moco.queue.ordered()[-len(views[0]) :].clone()


# One process


@pytest.mark.parametrize(("groups", "n"), [(1, 8), (2, 8), (3, 10), (8, 128)])
@pytest.mark.parametrize("shape", [(), (6,), (5, 4)])
def test_split_layers_normalise_group_by_group(groups: int, n: int, shape: tuple[int, ...]) -> None:
    layer = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(shape)](3, momentum=0.3).double()
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    x = torch.randn(n, 3, *shape, dtype=torch.float64)
    start = copy.deepcopy(layer)
    with SplitBatchNorm(groups):
        out = layer(x)
    means, variances, expected = [], [], []
    for part in x.tensor_split(groups):
        alone = copy.deepcopy(start)
        expected.append(alone(part))
        means.append(alone.running_mean)
        variances.append(alone.running_var)
    assert torch.allclose(out, torch.cat(expected), atol=1e-12)
    assert torch.allclose(layer.running_mean, torch.stack(means).mean(0), atol=1e-12)
    assert torch.allclose(layer.running_var, torch.stack(variances).mean(0), atol=1e-12)
    assert int(layer.num_batches_tracked) == 1


def test_split_leaves_eval_mode_and_the_time_after_it_alone() -> None:
    layer, x = nn.BatchNorm1d(3), torch.randn(8, 3)
    layer(x)
    before = copy.deepcopy(layer.state_dict())
    layer.eval()
    expected = layer(x)
    with SplitBatchNorm(4):
        assert torch.equal(layer(x), expected)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    layer.train()
    assert torch.allclose(layer(x).mean(0), torch.zeros(3), atol=1e-6)
    untracked = nn.BatchNorm1d(3, track_running_stats=False, affine=False)
    with SplitBatchNorm(2):
        out = untracked(x)
    assert torch.allclose(out[:4].mean(0), torch.zeros(3), atol=1e-6)


def test_keys_of_a_split_batch_come_back_in_order() -> None:
    # Without BatchNorm nothing but the order can differ.
    encoder, images = small_backbone(), torch.randn(37, 3, 2, 2)
    with torch.no_grad():
        for seed in range(5):
            assert torch.allclose(encode_split(encoder, images, 4, seed), encoder(images), atol=1e-6)


def test_each_group_has_statistics_of_its_own_and_random_members() -> None:
    encoder = small_backbone(batch_norm=True)
    images = torch.randn(32, 3, 2, 2)
    whole = encoder(images).detach()
    once, twice = (encode_split(encoder, images, 2, seed) for seed in (1, 2))
    assert not torch.allclose(whole, once, atol=1e-3)
    assert not torch.allclose(once, twice, atol=1e-3)
    assert torch.equal(once, encode_split(encoder, images, 2, 1))
    # All rows of a group depend on each other and on no other row: a changed image moves half of the batch.
    other = images.clone()
    other[5] += 1
    moved = (encode_split(encoder, other, 2, 1) - once).abs().amax(1) > 1e-6
    assert int(moved.sum()) == 16
    assert bool(moved[5])


def test_in_one_process_query_and_key_do_not_share_statistics() -> None:
    moco, views = make(), small_views(32, torch.float32)
    key_encoder = copy.deepcopy(moco.key_encoder).train()
    with torch.no_grad():
        shared = F.normalize(key_encoder(views[1]), dim=1)
    split = staged_keys(copy.deepcopy(moco), views)
    plain = staged_keys(make_like(moco, shuffle_bn=False), views)
    assert torch.allclose(plain, shared, atol=1e-6)
    assert float((split - shared).abs().max()) > 1e-2


def make_like(moco: MoCo, **options: Any) -> MoCo:
    other = make(**options)
    other.load_state_dict(moco.state_dict())
    return other


def test_split_statistics_still_track_the_batch() -> None:
    moco = make()
    images = 3 + 2 * torch.randn(64, 3, 2, 2)
    for _ in range(60):
        staged_keys(moco, [torch.randn(64, 3, 2, 2), images])
    # The input of the first BatchNorm is a linear map of the images.
    linear, norm = moco.key_encoder.backbone[1], moco.key_encoder.backbone[2]
    with torch.no_grad():
        hidden = linear(images.flatten(1))
    assert torch.allclose(norm.running_mean, hidden.mean(0), atol=0.05)
    assert torch.allclose(norm.running_var, hidden.var(0), rtol=0.2)
    assert int(norm.num_batches_tracked) == 60


def test_groups() -> None:
    # The authors' CIFAR-10 demonstration splits 512 images into 8; fewer than 16 images a group are too few, but two
    # groups are made of 4 images already.
    assert groups_for(512, 8) == 8
    assert groups_for(128, 8) == 8
    assert groups_for(64, 8) == 4
    assert groups_for(10, 8) == 2
    assert groups_for(4, 8) == 2
    assert groups_for(3, 8) == 1
    assert groups_for(512, 1) == 1
    assert groups_for(512, 2) == 2


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 7, 33])
def test_any_batch_size_trains(batch: int) -> None:
    moco = make(nn.Sequential(nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        keys = staged_keys(moco, small_views(batch, torch.float32))
    assert torch.isfinite(keys).all()


def test_a_batch_that_cannot_be_split_is_reported() -> None:
    with pytest.warns(UserWarning, match=r"shuffle_bn.*backbone\.2.*bn_splits=1.*bn_splits=2 or more"):
        make(bn_splits=1)(small_views(32, torch.float32))
    with pytest.warns(UserWarning, match=r"shuffle_bn.*backbone\.2.*2 images.*batches of 4 or more"):
        make()(small_views(2, torch.float32))


@pytest.mark.parametrize(
    "moco",
    [
        lambda: make(),
        lambda: make(shuffle_bn=False, bn_splits=1),
        lambda: make(small_backbone(), bn_splits=1),  # no BatchNorm at all
        lambda: MoCo(small_backbone(batch_norm=True), 16, "v3", hidden_dim=12),
        lambda: make(nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.LayerNorm(16)), bn_splits=1),
    ],
)
def test_no_warning_where_all_is_well(moco: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moco()(small_views(32, torch.float32))


def test_the_queries_batch_norm_is_not_split() -> None:
    moco, views = make(), small_views(32, torch.float32)
    alone = copy.deepcopy(moco.query_encoder)
    moco(views)
    alone(views[0])
    for name, value in alone.state_dict().items():
        assert torch.equal(value, moco.query_encoder.state_dict()[name]), name


def test_shuffling_does_not_touch_the_global_random_state() -> None:
    moco, views = make(), small_views(32, torch.float32)
    before = torch.get_rng_state()
    moco(views)
    assert torch.equal(before, torch.get_rng_state())


# Two ranks


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
