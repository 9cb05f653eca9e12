"""More layouts: solo-learn, VISSL, stable-pretraining and lightly's benchmark; see :mod:`layouts`."""

from __future__ import annotations

from typing import Any

import torch
from layouts import D, H, K, Layout, bare_resnet, mlp, norm_mlp, pair, prefixed, queue, trained, vit
from torch import Tensor, nn

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
        steps=40,
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
