"""Query and key of an image never share BatchNorm statistics: exchanged between ranks, split in one process."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import small_backbone, small_views
from torch import Tensor, nn

from moco_plugins import MoCo
from moco_plugins.core.batchnorm import SplitBatchNorm, encode_split, groups_for


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
