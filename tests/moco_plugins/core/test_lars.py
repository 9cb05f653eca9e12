"""LARS against its formula."""

from __future__ import annotations

import pytest
import torch

from moco_plugins.core.lars import LARS


def test_lars_is_its_formula() -> None:
    weight, bias, zero = (torch.nn.Parameter(t) for t in (torch.randn(4, 3), torch.randn(4), torch.zeros(2, 2)))
    parameters = [weight, bias, zero]
    optimizer = LARS(parameters, lr=0.5, momentum=0.9, weight_decay=0.1)
    want = [p.detach().clone() for p in parameters]
    moving = [torch.zeros_like(p) for p in parameters]
    for _ in range(3):
        for i, p in enumerate(parameters):
            p.grad = torch.randn_like(p)
            g = p.grad.clone()
            if i != 1:
                g = g + 0.1 * want[i]
                if want[i].norm() > 0:
                    g = g * 0.001 * want[i].norm() / g.norm()
            moving[i] = 0.9 * moving[i] + g
            want[i] = want[i] - 0.5 * moving[i]
        optimizer.step()
        for p, expected in zip(parameters, want, strict=True):
            assert torch.allclose(p, expected, atol=1e-6)


def test_lars_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="lr=-1"):
        LARS([torch.nn.Parameter(torch.ones(1))], lr=-1)


def test_both_adapters_have_this_one() -> None:
    pytest.importorskip("mmengine")
    from mmengine.registry import OPTIMIZERS
    from moco_lightly.optimizers import Recipe

    from moco_plugins import MoCo
    from moco_plugins.backbones import ConvNet

    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert type(OPTIMIZERS.build({"type": "moco_plugins.LARS", "params": parameters, "lr": 0.1})) is LARS
    moco = MoCo(ConvNet(1, 8), 128, queue_size=8, learnable_temperature=True)
    optimizer = Recipe("lars", 0.1, False, 0.9, 1e-4, True, "constant", 0).build_optimizer(moco, None)
    assert type(optimizer) is LARS
    # Biases, BatchNorm and the temperature neither decay (their group) nor adapt (LARS itself).
    decaying, others = optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (1e-4, 0.0)
    assert {p.ndim for p in decaying["params"]} == {2, 4}
    assert len(others["params"]) == 3 * 2 + 2 + 1
