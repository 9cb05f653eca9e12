from __future__ import annotations

import pytest
import torch

from moco_plugins.backbones import ConvNet, build_backbone


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("convnet", 1, 28),
        ("convnet", 3, 32),
        ("resnet18-cifar", 3, 32),
        ("resnet18", 1, 64),
        ("mobilenet_v3_small", 3, 64),
        ("timm/resnet10t", 3, 64),
        ("vit_tiny_patch16_224", 1, 32),
    ],
)
def test_width_is_what_the_backbone_returns(name: str, channels: int, size: int) -> None:
    backbone, width = build_backbone(name, channels, size)
    assert backbone.training
    assert backbone(torch.rand(2, channels, size, size)).shape == (2, width)


def test_convnet_is_three_convolutions_and_a_two_by_two_pool() -> None:
    backbone = ConvNet(1)
    convolutions = [m for m in backbone if isinstance(m, torch.nn.Conv2d)]
    assert [(c.out_channels, c.kernel_size[0], c.stride[0]) for c in convolutions] == [
        (32, 5, 2),
        (64, 3, 2),
        (128, 3, 1),
    ]
    assert backbone.feature_dim == 4 * 128


def test_cifar_stem_keeps_the_resolution() -> None:
    plain, _ = build_backbone("resnet18", 3, 64)
    cifar, _ = build_backbone("resnet18-cifar", 3, 64)
    sizes = []
    for backbone in (plain, cifar):
        backbone[0].layer1.register_forward_hook(lambda _m, _i, output: sizes.append(output.shape[-1]))
        backbone(torch.rand(2, 3, 64, 64))
    assert sizes == [16, 64]


def test_trying_the_width_leaves_no_trace() -> None:
    torch.manual_seed(0)
    backbone, _ = build_backbone("resnet18-cifar", 3, 32)
    assert int(backbone[0].bn1.num_batches_tracked) == 0
    assert float(backbone[0].bn1.running_mean.abs().max()) == 0


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(LookupError, match=r"backbone='resnet81'.*Did you mean resnet18.*convnet.*mobilenet_v2"):
        build_backbone("resnet81")
    with pytest.raises(LookupError, match=r"timm/resnet10tt.*close ones: .*resnet10t"):
        build_backbone("timm/resnet10tt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "alexnet", "image_size": 16}, r"alexnet.* cannot take images of 3 x 16 x 16"),
        ({"name": "convnet", "channels": 0}, "channels=0"),
        ({"name": "convnet", "pretrained": True}, "no published weights"),
        ({"name": "vgg11-cifar", "image_size": 32}, "only torchvision's resnets"),
    ],
)
def test_what_cannot_be_built(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_backbone(**arguments)
