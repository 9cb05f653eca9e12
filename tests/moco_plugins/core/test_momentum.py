"""The key encoder follows the query encoder: k <- m k + (1 - m) q, all of it, in place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import pytest
import torch
from reference import small_backbone, small_views
from torch import Tensor, nn

from moco_plugins import MoCo
from moco_plugins.core.momentum import ema
from moco_plugins.steps.pairing import copy_module, pair_parameters


def make(backbone: nn.Module | None = None, **options: object) -> MoCo:
    return MoCo(backbone or small_backbone(), 16, **{"queue_size": 20, "projection_dim": 8, **options})


def train_step(moco: MoCo, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> None:
    loss = moco(small_views(8, dtype))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9, 0.999, 1.0])
def test_average_is_the_papers(momentum: float) -> None:
    key, query = ([torch.randn(shape, dtype=torch.float64) for shape in [(3, 4), (5,), ()]] for _ in range(2))
    expected = [momentum * k + (1 - momentum) * q for k, q in zip(key, query, strict=True)]
    pointers, unchanged = [k.data_ptr() for k in key], copies(query)
    ema(key, query, momentum)
    assert pointers == [k.data_ptr() for k in key]
    assert all(torch.allclose(k, e, atol=1e-15) for k, e in zip(key, expected, strict=True))
    assert all(torch.equal(q, u) for q, u in zip(query, unchanged, strict=True))
    if momentum == 0:
        assert all(torch.equal(k, q) for k, q in zip(key, query, strict=True))


def test_momentum_of_one_keeps_the_key_encoder_and_of_zero_copies_the_query_encoder() -> None:
    frozen, copied = make(momentum=1.0), make(momentum=0.0, allow_low_momentum=True)
    start = copies(list(frozen.key_encoder.parameters()))
    for moco in (frozen, copied):
        optimizer = torch.optim.SGD(moco.parameters(), 0.1)
        for _ in range(3):
            train_step(moco, optimizer)
    assert torch.equal(frozen.query_encoder.projector[0].weight, copied.query_encoder.projector[0].weight) is False
    frozen_key = list(frozen.key_encoder.parameters())
    # The key encoder is made equal to the query encoder before the first step; both began alike.
    assert all(torch.equal(a, b) for a, b in zip(start, frozen_key, strict=True))
    for query, key in zip(copied.query_encoder.parameters(), copied.key_encoder.parameters(), strict=True):
        assert torch.equal(query, key)


def test_projection_head_moves_with_the_backbone_and_storage_stays() -> None:
    moco = make(momentum=0.9, variant="v3", queue_size=0, hidden_dim=12)
    pointers = [p.data_ptr() for p in moco.key_encoder.parameters()]
    before = copies(list(moco.key_encoder.parameters()))
    train_step(moco, torch.optim.SGD(moco.parameters(), 0.5))
    after = list(moco.key_encoder.parameters())
    assert pointers == [p.data_ptr() for p in after]
    for name, old, new in zip(dict(moco.key_encoder.named_parameters()), before, after, strict=True):
        assert not torch.equal(old, new), name


def test_key_encoder_starts_equal_and_takes_no_gradient() -> None:
    moco = make(small_backbone(batch_norm=True))
    for name, value in moco.query_encoder.state_dict().items():
        assert torch.equal(value, moco.key_encoder.state_dict()[name]), name
    assert not any(p.requires_grad for p in moco.key_encoder.parameters())
    assert all(p.requires_grad for p in moco.query_encoder.parameters())


def test_a_second_backbone_that_was_initialised_by_itself_starts_equal_too() -> None:
    backbone, second = small_backbone(batch_norm=True), small_backbone(batch_norm=True)
    second(torch.randn(9, 3, 2, 2))
    moco = make(backbone, key_encoder=second)
    for name, value in moco.query_encoder.state_dict().items():
        assert torch.equal(value, moco.key_encoder.state_dict()[name]), name


class Awkward(nn.Module):
    """What real backbones hold: tied weights, frozen ones, whole numbers as parameters, a scalar, no trainable bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16, bias=False)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 16)
        self.third.weight = self.second.weight
        self.second.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.table = nn.Parameter(torch.arange(16), requires_grad=False)
        self.register_buffer("offset", torch.zeros(16))
        self.register_buffer("not_saved", torch.ones(16), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(images.flatten(1)))
        out = self.third(torch.tanh(self.second(hidden))) * self.scale * self.not_saved
        return out[:, self.table] + self.offset


@pytest.mark.parametrize("owner", ["all parameters", "trainable parameters", "nobody"])
def test_tied_frozen_and_integer_parameters(owner: str) -> None:
    moco = make(Awkward(), momentum=0.5, follow_optimizer=owner != "nobody")
    key, query = moco.key_encoder.backbone, moco.query_encoder.backbone
    assert key.third.weight is key.second.weight
    optimizer = torch.optim.SGD([p for p in moco.parameters() if p.requires_grad or owner == "all parameters"], 0.5)
    expected = copies(list(key.second.parameters()))
    for _ in range(3):
        train_step(moco, optimizer)
        if owner == "nobody":
            moco.step()
        # A tied weight moves once a step, not once for each of its names.
        expected[0] = 0.5 * expected[0] + 0.5 * query.second.weight.detach()
        assert torch.allclose(key.second.weight, expected[0], atol=1e-6)
    assert torch.equal(key.table, query.table)
    assert key.table.dtype == torch.int64
    assert torch.equal(key.second.bias, query.second.bias)
    assert not torch.equal(key.scale, query.scale)


def test_integer_parameters_of_loaded_weights_reach_the_key_encoder() -> None:
    moco, loaded = make(Awkward()), Awkward()
    with torch.no_grad():
        loaded.table.copy_(torch.arange(15, -1, -1))
    moco.query_encoder.backbone.load_state_dict(loaded.state_dict())
    train_step(moco, torch.optim.SGD([p for p in moco.parameters() if p.requires_grad], 0.1))
    assert torch.equal(moco.key_encoder.backbone.table, loaded.table)


class Spectral(nn.Module):
    """A backbone with complex weights, as Fourier layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 16, dtype=torch.complex64) / 4)

    def forward(self, images: Tensor) -> Tensor:
        return (torch.fft.rfft(images.flatten(1)) @ self.weight).abs()


def test_complex_parameters_move_too() -> None:
    moco = make(Spectral(), momentum=0.5)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    for _ in range(2):
        before = moco.key_encoder.backbone.weight.detach().clone()
        train_step(moco, optimizer)
        query, key = moco.query_encoder.backbone.weight, moco.key_encoder.backbone.weight
        assert not torch.equal(before, key)
        assert torch.allclose(key, 0.5 * before + 0.5 * query, atol=1e-6)


def test_weights_that_are_changed_by_hand_although_they_are_frozen_are_followed_at_the_next_step() -> None:
    moco = make(momentum=0.5)
    moco.query_encoder.backbone.requires_grad_(False)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    train_step(moco, optimizer)
    with torch.no_grad():
        moco.query_encoder.backbone[1].weight.add_(1)
    before = moco.key_encoder.backbone[1].weight.clone()
    train_step(moco, optimizer)
    expected = 0.5 * before + 0.5 * moco.query_encoder.backbone[1].weight
    assert torch.allclose(moco.key_encoder.backbone[1].weight, expected, atol=1e-6)


@pytest.mark.parametrize("part", ["backbone", "projector"])
def test_a_part_frozen_in_the_middle_of_the_training_is_still_followed(part: str) -> None:
    # Its key twin lags behind, and catches up by the same average although no optimiser owns it any more.
    moco = make(momentum=0.5).double()
    optimizer = torch.optim.SGD(moco.parameters(), 0.5)
    for _ in range(3):
        train_step(moco, optimizer, torch.float64)
    getattr(moco.query_encoder, part).requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in moco.parameters() if p.requires_grad], 0.1)
    for _ in range(3):
        before = copies(list(moco.key_encoder.parameters()))
        train_step(moco, optimizer, torch.float64)
        for old, key, query in zip(before, moco.key_encoder.parameters(), moco.query_encoder.parameters(), strict=True):
            assert not torch.equal(old, query)
            assert torch.allclose(key, 0.5 * old + 0.5 * query, atol=1e-12)
    assert moco.steps == 6


def test_optimisers_that_step_parameter_by_parameter_during_backward() -> None:
    # As memory-saving recipes do: each parameter has an optimiser of its own, called as soon as its gradient is there.
    moco = make(momentum=0.5).double()
    twin = copy.deepcopy(moco)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in moco.query_encoder.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    together = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(5):
        views = small_views(8)
        moco(views).backward()
        twin(views).backward()
        together.step()
        together.zero_grad()
    assert moco.steps == 5
    for name, value in twin.state_dict().items():
        assert torch.allclose(moco.state_dict()[name].double(), value.double(), atol=1e-12), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_momentum_too_near_to_1_for_float32_is_reported(dtype: torch.dtype) -> None:
    moco = make(momentum=1 - 1e-7).to(dtype)
    with pytest.warns(UserWarning, match=r"momentum=0\.9999999 is too near to 1.*float64"):
        moco(small_views(8, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moco(small_views(8, dtype))  # once
        make(momentum=0.999).to(dtype)(small_views(8, dtype))


def test_names_must_pair() -> None:
    with pytest.raises(ValueError, match=r"key_encoder.*missing.*2\.weight"):
        pair_parameters(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"key_encoder.*buffers.*running_mean"):
        copy_module(nn.Sequential(nn.BatchNorm1d(2)), nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)))


def test_a_head_replaced_in_one_encoder_only_is_an_error_at_the_next_step() -> None:
    moco = make()
    train_step(moco, torch.optim.SGD(moco.parameters(), 0.1))
    moco.query_encoder.projector = nn.Linear(16, 8)
    with pytest.raises(ValueError, match="key_encoder"):
        train_step(moco, torch.optim.SGD(moco.parameters(), 0.1))


@pytest.mark.parametrize("mode", ["own", "copy", "ema"])
def test_buffers(mode: str) -> None:
    moco = make(small_backbone(batch_norm=True), momentum=0.75, bn_buffers=mode, shuffle_bn=False)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    query, key = moco.query_encoder.backbone[2], moco.key_encoder.backbone[2]
    for step in range(1, 5):
        moco(small_views(8, torch.float32)).backward()
        own = key.running_mean.clone(), key.running_var.clone()
        optimizer.step()
        optimizer.zero_grad()
        for before, mine, theirs in zip(
            own, (key.running_mean, key.running_var), (query.running_mean, query.running_var), strict=True
        ):
            expected = {"own": before, "copy": theirs, "ema": 0.75 * before + 0.25 * theirs}[mode]
            assert torch.allclose(mine, expected, atol=1e-7)
            assert not torch.allclose(before, theirs, atol=1e-4)
        assert int(key.num_batches_tracked) == int(query.num_batches_tracked) == step


def test_a_momentum_rule_of_ones_own_is_given_all_pairs_and_the_momentum() -> None:
    from moco_plugins import hookimpl
    from moco_plugins.hooks import manager as plugins

    calls: list[tuple[int, float]] = []

    class Plugin:
        @hookimpl
        def moco_build_momentum(self, name: str, options: dict[str, object]) -> object:
            if name != "test-rule":
                return None

            def rule(key: Sequence[Tensor], query: Sequence[Tensor], momentum: float) -> None:
                calls.append((len(list(key)), momentum * float(options["factor"])))

            return rule

    plugins.register(Plugin(), "test-rule-plugin")
    try:
        moco = make(momentum=0.9, momentum_rule="test-rule", momentum_options={"factor": 2})
        train_step(moco, torch.optim.SGD(moco.parameters(), 0.1))
    finally:
        plugins.unregister("test-rule-plugin")
    assert calls == [(len(list(moco.query_encoder.parameters())), 1.8)]
