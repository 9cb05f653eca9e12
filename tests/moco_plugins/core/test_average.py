"""Encoders in half precision: the average is kept in float32 beside them, and moves as it does there."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from reference import small_backbone, small_views
from torch import Tensor
from training import train_step

from moco_plugins import MoCo

HALF = [torch.bfloat16, torch.float16]


def build(dtype: torch.dtype, **options: object) -> MoCo:
    torch.manual_seed(0)
    return MoCo(small_backbone(True), 16, queue_size=40, projection_dim=8, shuffle_bn=False, **options).to(dtype)


def train(moco: MoCo, steps: int, dtype: torch.dtype, seed: int = 1) -> None:
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(moco.parameters(), 0.05)
    for _ in range(steps):
        train_step(moco, optimizer, small_views(8, dtype))


def way(moco: MoCo, start: list[Tensor]) -> Tensor:
    return torch.cat([(p.double() - s).flatten() for p, s in zip(moco.key_encoder.parameters(), start, strict=True)])


@pytest.mark.parametrize("dtype", HALF)
def test_the_key_encoder_moves_as_in_float32(dtype: torch.dtype) -> None:
    """The same query weights, step by step; the half key encoder's way is that of a float32 average to 1 %."""
    moco = build(dtype, momentum=0.999)
    train(moco, 1, dtype)
    start = [p.detach().double().clone() for p in moco.key_encoder.parameters()]
    plain = [p.clone() for p in start]  # the average, in float64
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(moco.parameters(), 0.05)
    for _ in range(300):
        train_step(moco, optimizer, small_views(8, dtype))
        for average, query in zip(plain, moco.query_encoder.parameters(), strict=True):
            average.lerp_(query.detach().double(), 0.001)
    expected = torch.cat([(p - s).flatten() for p, s in zip(plain, start, strict=True)])
    assert expected.norm() > 0.05
    kept = torch.cat([(a.double() - s).flatten() for a, s in zip(moco.average.tensors(), start, strict=True)])
    assert (kept - expected).norm() < 0.01 * expected.norm()
    # The weights themselves are what that rounds to, to half a unit in the last place.
    for weight, average in zip(moco.key_encoder.parameters(), moco.average.tensors(), strict=True):
        assert torch.equal(weight, average.to(dtype))
    assert way(moco, start).norm() > 0.5 * expected.norm()


def test_it_costs_four_bytes_a_weight_and_nothing_in_full_precision() -> None:
    moco = build(torch.bfloat16)
    weights = sum(p.numel() for p in moco.key_encoder.parameters())
    assert sum(t.numel() * t.element_size() for t in moco.average.tensors()) == 4 * weights
    assert all(t.dtype == torch.float32 for t in moco.average.tensors())
    for dtype in (torch.float32, torch.float64):
        moco = build(dtype)
        train(moco, 2, dtype)
        assert moco.average.tensors() == []
        assert not [name for name in moco.state_dict() if name.startswith("average")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the key encoder does not stand still
        train(build(torch.bfloat16, momentum=0.999), 2, torch.bfloat16)


def assert_same(a: MoCo, b: MoCo) -> None:
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[name]), name


def saved_and_loaded(moco: MoCo) -> MoCo:
    file = io.BytesIO()
    torch.save(moco.state_dict(), file)
    file.seek(0)
    other = build(torch.bfloat16, bn_buffers=moco.bn_buffers)
    torch.nn.init.ones_(next(other.key_encoder.parameters()))
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@pytest.mark.parametrize("bn_buffers", ["own", "ema"])
@pytest.mark.parametrize(
    "again",
    [saved_and_loaded, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.to("cpu").bfloat16()],
    ids=["state", "deepcopy", "pickle", "moved"],
)
def test_a_training_goes_on_bit_for_bit(again: object, bn_buffers: str) -> None:
    whole = build(torch.bfloat16, bn_buffers=bn_buffers)
    train(whole, 4, torch.bfloat16)
    second = again(copy.deepcopy(whole))
    for moco in (whole, second):
        train(moco, 4, torch.bfloat16, seed=2)
    assert_same(whole, second)
    assert any(not torch.equal(t, t.bfloat16().float()) for t in second.average.tensors())


def test_who_writes_into_the_key_encoder_is_followed() -> None:
    moco = build(torch.bfloat16)
    train(moco, 2, torch.bfloat16)
    with torch.no_grad():
        for p in moco.key_encoder.parameters():
            p.fill_(3)
    train(moco, 1, torch.bfloat16)
    assert all((p > 2.9).all() for p in moco.key_encoder.parameters())
    # Weights that are loaded without their companions, or with those of others.
    state = moco.state_dict()
    others = {name: torch.zeros_like(value) if name.startswith("average") else value for name, value in state.items()}
    without = {name: value for name, value in state.items() if not name.startswith("average")}
    for given in (others, without):
        other = build(torch.bfloat16)
        other.load_state_dict(given)
        assert all((t > 2.9).all() for t in other.average.tensors())


def test_a_checkpoint_in_half_precision_loads_into_full() -> None:
    half = build(torch.bfloat16)
    train(half, 2, torch.bfloat16)
    full = build(torch.float32)
    full.load_state_dict(half.state_dict())
    assert torch.equal(next(full.key_encoder.parameters()), next(half.key_encoder.parameters()).float())
