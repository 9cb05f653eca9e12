"""Encoders whose tensors have other names, or others than plain weights: wrapped, parametrised, with adapters."""

from __future__ import annotations

import pytest
import torch
from reference import small_backbone, small_views
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from training import make, train_step

from moco_plugins import MoCo
from moco_plugins.steps.pairing import pair_parameters


def assert_averages(moco: MoCo, steps: int = 3, m: float = 0.9) -> None:
    """Train; the key encoder is at each step what the formula says of each parameter."""
    optimizer = torch.optim.SGD([p for p in moco.parameters() if p.requires_grad], 0.1)
    train_step(moco, optimizer, small_views(6))
    for _ in range(steps):
        before = [p.detach().clone() for p in moco.key_encoder.parameters()]
        train_step(moco, optimizer, small_views(6))
        for old, key, query in zip(before, moco.key_encoder.parameters(), moco.query_encoder.parameters(), strict=True):
            assert torch.allclose(key, m * old + (1 - m) * query, atol=1e-12)
    pairs = zip(moco.query_encoder.parameters(), moco.key_encoder.parameters(), strict=True)
    assert any(not torch.equal(query, key) for query, key in pairs)


def test_a_compiled_query_encoder_is_paired_with_a_plain_key_encoder() -> None:
    moco = make()
    moco.query_encoder = torch.compile(moco.query_encoder, backend="eager")
    assert "_orig_mod" in next(iter(moco.query_encoder.state_dict()))
    assert_averages(moco)


@pytest.mark.parametrize("wrap", ["module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_wrappers_around_parts_are_seen_through(wrap: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.add_module(wrap, inner)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.get_submodule(wrap)(x)

    moco = make()
    moco.query_encoder.backbone = Wrapped(moco.query_encoder.backbone)
    assert_averages(moco)


def test_a_name_that_would_stand_for_two_is_left_as_it_is() -> None:
    twice = nn.ModuleDict({"module": nn.ModuleDict({"a": nn.Linear(2, 2)}), "a": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="key_encoder"):
        pair_parameters(twice, nn.ModuleDict({"a": nn.Linear(2, 2)}))


def test_parametrised_weights_are_averaged_by_their_own_parameters() -> None:
    backbone = small_backbone()
    parametrizations.weight_norm(backbone[1])
    moco = MoCo(backbone, 16, queue_size=40, projection_dim=8, momentum=0.9).double()
    assert "backbone.1.parametrizations.weight.original0" in dict(moco.key_encoder.named_parameters())
    assert_averages(moco)
    with torch.no_grad():  # and the key encoder's weight is made of them
        layer = moco.key_encoder.backbone[1]
        g, v = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
        assert torch.allclose(layer.weight, g * v / v.norm(dim=1, keepdim=True))


class LowRank(nn.Module):
    """W + B A, as LoRA has it."""

    def __init__(self, out: int, width: int) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.randn(2, width, dtype=torch.float64))
        self.lora_b = nn.Parameter(torch.zeros(out, 2, dtype=torch.float64))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.lora_b @ self.lora_a


def test_adapters_that_the_backbone_had_are_averaged() -> None:
    backbone = small_backbone().double().requires_grad_(False)
    parametrize.register_parametrization(backbone[1], "weight", LowRank(24, 12))
    moco = MoCo(backbone, 16, queue_size=40, projection_dim=8, momentum=0.9)
    assert_averages(moco)
    assert moco.key_encoder.backbone[1].parametrizations.weight[0].lora_b.abs().sum() > 0


def test_adapters_that_came_later_are_refused_with_words() -> None:
    moco = make()
    parametrize.register_parametrization(moco.query_encoder.backbone[1], "weight", LowRank(24, 12))
    with pytest.raises(ValueError, match=r"parametrizations.*before MoCo is built around the backbone"):
        moco(small_views(6))


def test_lora_of_peft_is_averaged() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["1"])
    backbone = peft.get_peft_model(small_backbone().double(), config)
    moco = MoCo(backbone, 16, queue_size=40, projection_dim=8, momentum=0.9).double()
    assert_averages(moco)
