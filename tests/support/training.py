"""Small helpers of the tests that train a small MoCo by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from reference import small_backbone
from torch import Tensor, nn

from moco_plugins import MoCo

Views = list[Tensor]


def make(**options: object) -> MoCo:
    return MoCo(small_backbone(), 16, **{"queue_size": 40, "projection_dim": 8, "momentum": 0.9, **options}).double()


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(module: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name.split(".")[0] for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for name, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[name]), name


def keys_now(moco: MoCo, images: Tensor) -> Tensor:
    with torch.no_grad():
        return F.normalize(moco.key_encoder(images), dim=1)


def train_step(moco: MoCo, optimizer: torch.optim.Optimizer, views: Views) -> float:
    loss = moco(views)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())
