"""Checkpoints as other people's code writes them, built of its parts in the layout of its published source.

Each function says which commit it follows. A layout is returned with what its original computes: functions of images that
give features and, where there is one, projections of the query and the key encoder, for comparison.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn

Encode = Callable[[Tensor], Tensor]
K, D, H = 32, 16, 24


@dataclass
class Layout:
    """A checkpoint, and what the modules it was saved from compute."""

    content: dict[str, Any]
    query_features: Encode
    query: Encode | None = None
    key: Encode | None = None
    predicted: Encode | None = None
    queue: Tensor | None = None
    ptr: int = 0
    steps: int | None = None
    left: tuple[str, ...] = ()
    size: int = 64
    options: dict[str, Any] = field(default_factory=dict)


def trained(*modules: nn.Module) -> None:
    """Give BatchNorm statistics and affine parameters of their own, as training would."""
    generator = torch.Generator().manual_seed(3)
    for module in modules:
        for part in module.modules():
            if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
                part.running_mean.copy_(torch.randn(part.running_mean.shape, generator=generator) * 0.1)
                part.running_var.copy_(torch.rand(part.running_var.shape, generator=generator) + 0.5)
                part.num_batches_tracked.fill_(7)
        module.eval()


def bare_resnet() -> nn.Module:
    net = torchvision.models.resnet18()
    net.fc = nn.Identity()
    return net


def mlp(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(512, H, bias), nn.ReLU(), nn.Linear(H, D, bias))


def norm_mlp(widths: list[int], last_norm: bool = True, affine: bool = False) -> nn.Sequential:
    """Linear without bias and BatchNorm in turn, as MoCo v3's heads."""
    head = nn.Sequential()
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        last = i == len(widths) - 2
        head.append(nn.Linear(a, b, bias=False))
        if not last:
            head.extend([nn.BatchNorm1d(b), nn.ReLU(inplace=True)])
        elif last_norm:
            head.append(nn.BatchNorm1d(b, affine=affine))
    return head


def pair(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    query, key = build(), build()
    trained(query, key)
    return query, key


def prefixed(prefix: str, module: nn.Module) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in module.state_dict().items()}


def queue() -> Tensor:
    return nn.functional.normalize(torch.randn(K, D), dim=1)


def vit(heads: int = 3, **options: Any) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0, num_heads=heads, **options)


# facebookresearch/moco at 5df3287 (moco/builder.py)


def moco(variant: str = "v2", module: str = "module.") -> Layout:
    def build() -> nn.Module:
        net = torchvision.models.resnet18(num_classes=D)
        if variant == "v2":
            net.fc = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), net.fc)
        return net

    query, key = pair(build)
    keys = queue()
    state = prefixed(f"{module}encoder_q.", query) | prefixed(f"{module}encoder_k.", key)
    state |= {f"{module}queue": keys.T.contiguous(), f"{module}queue_ptr": torch.tensor([8])}
    content = {"epoch": 200, "arch": "resnet18", "state_dict": state, "optimizer": {"state": {}, "param_groups": []}}
    features = copy.deepcopy(query)
    features.fc = nn.Identity()
    return Layout(
        content, features, query, key, queue=keys, ptr=8, options={"hidden_dim": 512} if variant == "v2" else {}
    )


# facebookresearch/moco-v3 at c349e6e (names and shapes of moco/builder.py and vits.py)


def moco_v3(kind: str = "resnet") -> Layout:
    if kind == "resnet":
        head, build, width = "fc", bare_resnet, 512
        widths, last = [512, H, D], False
    else:
        head, width = "head", 192
        build = vit
        widths, last = [192, H, H, D], True
    query, key = pair(build)
    heads = norm_mlp(widths), norm_mlp(widths)
    predictor = norm_mlp([D, H, D], last)
    trained(*heads, predictor)
    state: dict[str, Tensor] = {}
    for name, encoder, projector in (("base_encoder", query, heads[0]), ("momentum_encoder", key, heads[1])):
        state |= prefixed(f"module.{name}.", encoder) | prefixed(f"module.{name}.{head}.", projector)
    state |= prefixed("module.predictor.", predictor)
    encode = nn.Sequential(query, heads[0])
    return Layout(
        {"epoch": 300, "arch": "resnet50", "state_dict": state, "optimizer": {}, "scaler": {}},
        query,
        encode,
        nn.Sequential(key, heads[1]),
        nn.Sequential(encode, predictor),
        size=64 if width == 512 else 32,
        options={"variant": "v3-resnet" if kind == "resnet" else "v3"},
    )


# open-mmlab/mmselfsup, branch 0.x at 6faad81 (models/algorithms/moco.py, mocov3.py)


class MoCoV2Neck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def mmselfsup_0x() -> Layout:
    query, key = pair(lambda: nn.Sequential(bare_resnet(), MoCoV2Neck()))
    keys = queue()
    model = nn.Module()
    model.encoder_q, model.encoder_k, model.backbone, model.neck = query, key, query[0], query[1]
    state = dict(model.state_dict())
    state |= {"queue": keys.T.contiguous(), "queue_ptr": torch.tensor([4])}
    content = {"meta": {"epoch": 200, "iter": 1000, "mmcv_version": "1.6"}, "state_dict": state, "optimizer": {}}
    return Layout(content, query[0], query, key, queue=keys, ptr=4, steps=1000, options={"hidden_dim": H})


# open-mmlab/mmselfsup, branch 1.x at 80bb3f4, and mmpretrain at ee7f2e8: MMEngine's ExponentialMovingAverage


def mmselfsup_1x() -> Layout:
    query, key = pair(lambda: nn.Sequential(bare_resnet(), MoCoV2Neck()))
    keys = queue()
    model = nn.Module()
    model.backbone, model.neck, model.encoder_k = query[0], query[1], nn.Module()
    model.encoder_k.module = key
    model.encoder_k.register_buffer("steps", torch.tensor(70))
    state = dict(model.state_dict()) | {"queue": keys.T.contiguous(), "queue_ptr": torch.tensor([0])}
    return Layout(
        {"meta": {"epoch": 1}, "state_dict": state},
        query[0],
        query,
        key,
        queue=keys,
        steps=70,
        options={"hidden_dim": H},
    )


def mmselfsup_0x_v3() -> Layout:
    """mocov3.py and necks/nonlinear_neck.py of the same branch: fc0, bn0, fc1, ...; the predictor is the head's."""
    query, key = pair(lambda: nn.Sequential(bare_resnet(), nonlinear_neck([512, H, D])))
    predictor = nonlinear_neck([D, H, D], last_norm=False)
    trained(predictor)
    model = nn.Module()
    model.base_encoder, model.momentum_encoder, model.backbone, model.neck = query, key, query[0], query[1]
    model.head = nn.Module()
    model.head.predictor = predictor
    content = {"meta": {"epoch": 3}, "state_dict": model.state_dict()}
    return Layout(content, query[0], query, key, nn.Sequential(query, predictor), options={"variant": "v3-resnet"})


def nonlinear_neck(widths: list[int], last_norm: bool = True) -> nn.Sequential:
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (name, part) in enumerate((type(part).__name__, part) for part in norm_mlp(widths, last_norm)):
        parts[{"Linear": "fc", "BatchNorm1d": "bn", "ReLU": "relu"}[name] + str(i // 3)] = part
    return nn.Sequential(parts)
