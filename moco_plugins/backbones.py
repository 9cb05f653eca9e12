"""Backbones by name: a small convnet for a laptop, and whatever torchvision and timm have."""

from __future__ import annotations

import difflib
import numbers
import re
from typing import Any

import torch
from torch import Tensor, nn

from .sizes import Size, sides, written

_CIFAR = "-cifar"
#: torchvision's four names for the classifier of a model.
HEADS = ("fc", "classifier", "head", "heads")


class ConvNet(nn.Sequential):
    """Three convolutions for small images (28 to 96 pixels): a backbone that trains on a laptop in a minute.

    5x5/2, 3x3/2 and 3x3 convolutions with 32, 64 and 128 channels, each with BatchNorm and ReLU, then average pooling
    to 2 x 2: (N, C, H, W) -> (N, 512).

    Args:
        channels: C of the images, 1 or 3 as a rule.
        width: channels of the first convolution, 32; the others have twice and four times as many.
    """

    def __init__(self, channels: int = 3, width: int = 32) -> None:
        self.feature_dim = 16 * width
        super().__init__(
            *_block(channels, width, kernel=5, stride=2),
            *_block(width, 2 * width, kernel=3, stride=2),
            *_block(2 * width, 4 * width, kernel=3, stride=1),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )


def _block(channels: int, out: int, kernel: int, stride: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU(inplace=True),
    ]


def build_backbone(
    name: str, channels: int = 3, image_size: Size = 224, pretrained: bool = False
) -> tuple[nn.Module, int]:
    """Build a backbone without its classifier; return it with the width of its features.

    Args:
        name: "convnet" (:class:`ConvNet`); a torchvision classification model ("resnet18", "vit_b_16"); a torchvision
            resnet with "-cifar" ("resnet18-cifar"), which has a 3x3 stem without max pooling, for images of 32 to 64
            pixels (He et al. 2016, arXiv:1512.03385, section 4.2); a timm model, as "timm/NAME", or just NAME where
            torchvision has no model of that name.
        channels: channels of the images.
        image_size: height and width of the images in pixels, or (height, width).
        pretrained: start from the weights that the library downloads.

    Returns:
        (backbone, D): a module (N, C, H, W) -> (N, D). The names in its state dict are the library's own: they load with
        ``strict=True`` into torchvision's model once its classifier (``fc``, ``classifier``, ``head`` or ``heads``, all of
        it) is an ``nn.Identity()``, and into ``timm.create_model(name, num_classes=0)``.

    Raises:
        LookupError: no library has a model called ``name``; the message lists what there is.
        ValueError: the model cannot take such images, or has no weights to download.
    """
    if not isinstance(channels, numbers.Integral) or channels < 1:
        raise ValueError(f"channels={channels!r} must be a whole number of at least 1")
    sides("image_size", image_size)
    if name == "convnet":
        if pretrained:
            raise ValueError("pretrained=True: 'convnet' has no published weights; use a torchvision or timm model")
        convnet = ConvNet(channels)
        return convnet, convnet.feature_dim
    if name.startswith("timm/"):
        return _timm(name.removeprefix("timm/"), channels, image_size, pretrained)
    from torchvision import models

    base = name.removesuffix(_CIFAR)
    if base in models.list_models(module=models):
        return _torchvision(name, channels, image_size, pretrained)
    if _timm_has(name):
        return _timm(name, channels, image_size, pretrained)
    raise LookupError(_unknown(name, models.list_models(module=models)))


def _unknown(name: str, torchvision_models: list[str]) -> str:
    close = difflib.get_close_matches(name, [*torchvision_models, "convnet", "resnet18-cifar"], n=3)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    timm = (
        "or any of timm's models (timm.list_models())" if _timm_installed() else "or, with pip install timm, any of its"
    )
    return (
        f"backbone={name!r} is not known.{hint} There are: convnet; torchvision's {', '.join(torchvision_models)}; "
        f"its resnets with {_CIFAR!r} appended (resnet18-cifar); {timm}, as timm/NAME"
    )


def _torchvision(name: str, channels: int, image_size: Size, pretrained: bool) -> tuple[nn.Module, int]:
    from torchvision import models

    base = name.removesuffix(_CIFAR)
    options: dict[str, Any] = {"weights": "DEFAULT" if pretrained else None}
    if base.startswith("vit_"):
        height, width = sides("image_size", image_size)
        if height != width:
            raise ValueError(
                f"backbone={name!r} takes squares, not {written(image_size)}; use one of timm's, as timm/NAME"
            )
        options["image_size"] = height
    if base in ("googlenet", "inception_v3"):
        options |= {"init_weights": True, "aux_logits": pretrained}
    model = models.get_model(base, **options)
    if name.endswith(_CIFAR):
        if not isinstance(model, models.ResNet):
            raise ValueError(
                f"backbone={name!r}: only torchvision's resnets have a {_CIFAR!r} form, such as resnet18-cifar"
            )
        model.conv1 = nn.Conv2d(3, model.conv1.out_channels, 3, 1, 1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = nn.Identity()
    if channels != 3:
        _change_channels(model, channels)
    return _without_head(model, name, channels, image_size)


def _change_channels(model: nn.Module, channels: int) -> None:
    """Replace the first convolution by one for ``channels`` channels; pretrained weights are averaged over colours."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            new = nn.Conv2d(
                channels,
                module.out_channels,
                module.kernel_size,  # type: ignore[arg-type]
                module.stride,  # type: ignore[arg-type]
                module.padding,  # type: ignore[arg-type]
                module.dilation,  # type: ignore[arg-type]
                bias=module.bias is not None,
            )
            with torch.no_grad():
                new.weight.copy_(module.weight.mean(1, keepdim=True).expand_as(new.weight) * (3 / channels))
                if new.bias is not None and module.bias is not None:
                    new.bias.copy_(module.bias)
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, new)
            return


def _without_head(model: nn.Module, name: str, channels: int, image_size: Size) -> tuple[nn.Module, int]:
    for head in HEADS:
        if hasattr(model, head):
            # Flatten has no weights, and convnets whose classifier pools or flattens still return (N, D).
            setattr(model, head, nn.Flatten())
            break
    else:
        raise ValueError(f"backbone={name!r}: do not know which part of it is the classifier; try timm/{name}")
    return model, _width(model, name, channels, image_size)


@torch.no_grad()
def _width(model: nn.Module, name: str, channels: int, image_size: Size) -> int:
    """Find the width of the features by trying one image."""
    model.eval()
    try:
        features: Tensor = model(torch.zeros(1, channels, *sides("image_size", image_size)))
    except Exception as error:
        raise ValueError(
            f"backbone={name!r} cannot take images of {channels} x {written(image_size)}: {error}. "
            "Use a larger image_size, or convnet or resnet18-cifar for small images"
        ) from error
    finally:
        model.train()
    return features.shape[1]


def _timm_installed() -> bool:
    import importlib.util

    return importlib.util.find_spec("timm") is not None


def _timm_has(name: str) -> bool:
    if not _timm_installed():
        return False
    import timm

    return bool(timm.is_model(name))


def _timm(name: str, channels: int, image_size: Size, pretrained: bool) -> tuple[nn.Module, int]:
    if not _timm_installed():
        raise LookupError(f"backbone='timm/{name}': timm is not installed: pip install \"moco-plugins[timm]\"")
    import timm

    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=5)
        raise LookupError(
            f"backbone='timm/{name}': timm {timm.__version__} has no such model"
            + (f"; close ones: {', '.join(close)}" if close else "; timm.list_models() lists them")
        )
    options: dict[str, Any] = {"pretrained": pretrained, "in_chans": channels, "num_classes": 0}
    if re.match(r"(.*vit|deit|swin|beit|eva|cait|xcit)", name):
        options["img_size"] = image_size
    try:
        model = timm.create_model(name, **options)
    except TypeError:  # a name that looked like a transformer, but whose model takes any size
        options.pop("img_size", None)
        model = timm.create_model(name, **options)
    return model, _width(model, f"timm/{name}", channels, image_size)
