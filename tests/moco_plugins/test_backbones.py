from __future__ import annotations

import pytest
import torch

from moco_plugins.backbones import HEADS, ConvNet, build_backbone


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


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vit_b_32", "convnext_tiny", "mobilenet_v3_small"])
def test_weights_load_into_torchvisions_model_without_its_head(name: str) -> None:
    from torchvision import models

    backbone, width = build_backbone(name, 3, 64)
    theirs = models.get_model(name, weights=None, **({"image_size": 64} if name.startswith("vit") else {}))
    (head,) = (part for part in HEADS if hasattr(theirs, part))
    setattr(theirs, head, torch.nn.Identity())
    theirs.load_state_dict(backbone.state_dict(), strict=True)
    backbone.load_state_dict(theirs.state_dict(), strict=True)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(theirs.eval()(images).flatten(1), backbone.eval()(images))
        assert backbone(images).shape == (2, width)


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "convnext_atto"])
def test_weights_load_into_timms_model_without_its_head(name: str) -> None:
    timm = pytest.importorskip("timm")
    backbone, _ = build_backbone(f"timm/{name}", 3, 64)
    theirs = timm.create_model(name, num_classes=0, **({"img_size": 64} if name.startswith("vit") else {}))
    theirs.load_state_dict(backbone.state_dict(), strict=True)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(theirs.eval()(images), backbone.eval()(images))


def test_resnet_with_a_small_stem_has_torchvisions_names() -> None:
    from torchvision.models import resnet18

    backbone, _ = build_backbone("resnet18-cifar", 3, 32)
    theirs = resnet18()
    theirs.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    theirs.fc = torch.nn.Identity()
    theirs.load_state_dict(backbone.state_dict(), strict=True)


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
        backbone.layer1.register_forward_hook(lambda _m, _i, output: sizes.append(output.shape[-1]))
        backbone(torch.rand(2, 3, 64, 64))
    assert sizes == [16, 64]


def test_trying_the_width_leaves_no_trace() -> None:
    torch.manual_seed(0)
    backbone, _ = build_backbone("resnet18-cifar", 3, 32)
    assert int(backbone.bn1.num_batches_tracked) == 0
    assert float(backbone.bn1.running_mean.abs().max()) == 0


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
