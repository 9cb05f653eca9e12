"""Checkpoints as other people's code writes them, built of its parts in the layout of its published source.

Each function says which commit it follows. A layout is returned with what its original computes: functions of images that
give features and, where there is one, projections of the query and the key encoder, for comparison.
"""

from __future__ import annotations

import copy
import itertools
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


# vturrisi/solo-learn at 9187ea3 (solo/methods/mocov2plus.py, mocov3.py)


def solo_learn(method: str = "mocov2plus", cifar: bool = False) -> Layout:
    def build() -> nn.Module:
        net = bare_resnet()
        if cifar:
            net.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=2, bias=False)
            net.maxpool = nn.Identity()
        return net

    query, key = pair(build)
    head = mlp if method == "mocov2plus" else lambda: norm_mlp([512, H, D])
    heads = pair(head)
    predictor = norm_mlp([D, H, D], last_norm=False)
    trained(predictor)
    state = prefixed("backbone.", query) | prefixed("classifier.", nn.Linear(512, 10))
    state |= (
        prefixed("momentum_backbone.", key)
        | prefixed("projector.", heads[0])
        | prefixed("momentum_projector.", heads[1])
    )
    both = torch.stack([queue(), queue()])  # 2 x K x D
    encode = nn.Sequential(query, heads[0])
    options: dict[str, Any] = {"hidden_dim": H, "queue_size": 2 * K}
    if method == "mocov2plus":
        state |= {"queue": both.transpose(1, 2).contiguous(), "queue_ptr": torch.tensor([8])}
    else:
        state |= prefixed("predictor.", predictor)
        options = {"variant": "v3-resnet"}
    content = {
        "epoch": 9,
        "global_step": 90,
        "pytorch-lightning_version": "2.1.2",
        "state_dict": state,
        "optimizer_states": [],
    }
    # From the oldest keys to the newest, those of both views in turn.
    one = torch.roll(both, -8, 1).transpose(0, 1).reshape(2 * K, D) if method == "mocov2plus" else None
    return Layout(
        content,
        query,
        encode,
        nn.Sequential(key, heads[1]),
        nn.Sequential(encode, predictor) if method == "mocov3" else None,
        queue=one,
        steps=90,
        left=("classifier.weight", "classifier.bias"),
        size=32 if cifar else 64,
        options=options,
    )


# facebookresearch/vissl at 09270ed (models/base_ssl_model.py, trunks/resnext.py, heads/mlp.py, losses/moco_loss.py)


def vissl() -> Layout:
    query, key = pair(bare_resnet)
    heads = pair(mlp)

    def trunk(net: nn.Module) -> dict[str, Tensor]:
        return prefixed("_feature_blocks.", net)

    def head(net: nn.Module) -> dict[str, Tensor]:  # two MLPs: Linear and ReLU, then Linear
        return {f"{int(name[0]) // 2}.clf.0.{name[2:]}": value for name, value in net.state_dict().items()}

    keys = queue()
    loss = {f"moco_encoder.trunk.{name}": value for name, value in trunk(key).items()}
    loss |= {f"moco_encoder.heads.{name}": value for name, value in head(heads[1]).items()}
    loss |= {"queue": keys.T.contiguous(), "queue_ptr": torch.tensor([8])}
    content = {
        "phase_idx": 3,
        "iteration": 40,
        "loss": loss,
        "classy_state_dict": {
            "train_phase_idx": 2,
            "base_model": {
                "model": {"trunk": trunk(query), "heads": head(heads[0])},
                "meta": {"trunk": {}, "heads": []},
            },
        },
    }
    return Layout(
        content,
        query,
        nn.Sequential(query, heads[0]),
        nn.Sequential(key, heads[1]),
        queue=keys,
        ptr=8,
        options={"hidden_dim": H},
    )


# galilai-group/stable-pretraining at d15ec96 (methods/mocov2.py, backbone/utils.py, callbacks/queues.py)


def stable_pretraining(filled: bool = True) -> Layout:
    query, key = pair(vit)
    heads = pair(lambda: nn.Sequential(nn.Linear(192, H), nn.ReLU(inplace=True), nn.Linear(H, D)))
    keys = queue()
    state: dict[str, Tensor] = {}
    for name, student, teacher in (("backbone", query, key), ("projector", *heads)):
        state |= prefixed(f"{name}.student.", student) | prefixed(f"{name}.teacher.", teacher)
        for counter in ("base_ema_coefficient", "final_ema_coefficient", "ema_coefficient"):
            state[f"{name}.{counter}"] = torch.tensor(0.999)
    state |= {"queue.pointer": torch.tensor(8), "queue.filled": torch.tensor(filled), "queue.out": keys}
    state["queue.initialized"] = torch.tensor(True)
    return Layout(
        {"epoch": 2, "global_step": 30, "state_dict": state},
        query,
        nn.Sequential(query, heads[0]),
        nn.Sequential(key, heads[1]),
        queue=keys,
        ptr=8,
        steps=30,
        size=32,
        options={"hidden_dim": H},
    )


# lightly at e8d317f (benchmarks/imagenet/resnet50/mocov2.py); its head is lightly's own


def lightly_benchmark() -> Layout:
    from lightly.models.modules import MoCoProjectionHead

    query, key = pair(bare_resnet)
    heads = pair(lambda: MoCoProjectionHead(512, H, D))
    state = prefixed("backbone.", query) | prefixed("projection_head.", heads[0])
    state |= prefixed("key_backbone.", key) | prefixed("key_projection_head.", heads[1])
    state |= prefixed("online_classifier.classification_head.", nn.Linear(512, 10))
    return Layout(
        {"epoch": 1, "global_step": 12, "state_dict": state, "hyper_parameters": {"batch_size_per_device": 256}},
        query,
        nn.Sequential(query, heads[0]),
        nn.Sequential(key, heads[1]),
        steps=12,
        left=("online_classifier.classification_head.weight", "online_classifier.classification_head.bias"),
        options={"hidden_dim": H, "queue_size": K},
    )
