"""LARS against its formula."""

import pytest
import torch

pytest.importorskip("mmengine")

from mmengine.registry import OPTIMIZERS


def test_lars_is_its_formula():
    torch.manual_seed(0)
    weight, bias, zero = (torch.nn.Parameter(t) for t in (torch.randn(4, 3), torch.randn(4), torch.zeros(2, 2)))
    parameters = [weight, bias, zero]
    optimizer = OPTIMIZERS.build(
        {"type": "moco_plugins.LARS", "params": parameters, "lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}
    )
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


def test_lars_refuses_nonsense():
    with pytest.raises(ValueError, match="lr=-1"):
        OPTIMIZERS.build({"type": "moco_plugins.LARS", "params": [torch.nn.Parameter(torch.ones(1))], "lr": -1})
