"""Backbones from configs: of any registry, returning a tensor or a tuple of feature maps, with or without a neck."""

from __future__ import annotations

from typing import Any

import torch
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor, nn

from moco_plugins.backbones import build_backbone
from moco_plugins.sizes import Size, sides


def Backbone(name: str, channels: int = 3, image_size: Size = 224, pretrained: bool = False) -> nn.Module:
    """Build a backbone by name: "convnet", a torchvision model, or "timm/NAME"; see :func:`moco_plugins.backbones`.

    The arguments are those of :func:`moco_plugins.backbones.build_backbone`. The module knows its ``feature_dim``.
    """
    module, feature_dim = build_backbone(name, channels, image_size, pretrained)
    module.feature_dim = feature_dim  # type: ignore[assignment]
    return module


class Features(nn.Module):
    """Make one feature vector (N, D) of what a backbone (and a neck without parameters) returns.

    Of a tuple the last entry is taken; feature maps (N, D, H, W) or (N, D, T, H, W) and tokens (N, L, D) are averaged
    over places.
    """

    def __init__(self, backbone: nn.Module, neck: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        self.neck = neck

    def forward(self, images: Tensor) -> Tensor:
        """Return (N, D)."""
        outputs = self.backbone(images)
        if self.neck is not None:
            outputs = self.neck(outputs)
        return as_vectors(outputs)


class NeckProjector(nn.Module):
    """A neck with parameters as projection head: it gets the pooled features as a tuple of 1 x 1 feature maps."""

    def __init__(self, neck: nn.Module) -> None:
        super().__init__()
        self.neck = neck

    def forward(self, features: Tensor) -> Tensor:
        """Return the projections (N, projection_dim) of features (N, D)."""
        return as_vectors(self.neck((features[:, :, None, None],)))


def as_vectors(outputs: Any) -> Tensor:
    """Return (N, D) of a backbone's output."""
    if isinstance(outputs, (tuple, list)) and outputs:
        outputs = outputs[-1]
    if not isinstance(outputs, Tensor):
        raise TypeError(f"backbone returned a {type(outputs).__name__}; it must return a tensor or a tuple of tensors")
    if outputs.ndim >= 4:
        return outputs.flatten(2).mean(2)
    return outputs.mean(1) if outputs.ndim == 3 else outputs


def build_part(part: Any, name: str) -> nn.Module:
    """Build a module from its config, or take one that is built."""
    if isinstance(part, nn.Module):
        return part
    if not isinstance(part, dict):
        raise TypeError(
            f"{name}={part!r} is a {type(part).__name__}; it must be a config with a type, or a built module"
        )
    try:
        built: nn.Module = MODELS.build(part)
    except (KeyError, RuntimeError) as error:
        if not isinstance(part.get("type"), str) and "type" in part:
            raise
        hint = (
            f"{name}={dict(part)!r}: {error}. A backbone of torchvision or timm is "
            "dict(type='moco_plugins.Backbone', name='resnet50'); one of another library needs its scope "
            "('mmpretrain.ResNet'), one of your own registered with MMEngine's MODELS and its module in custom_imports"
        )
        raise type(error)(hint) from error
    return built


def build_features(
    backbone: Any, neck: Any, feature_dim: int | None, image_size: Size
) -> tuple[nn.Module, nn.Module | None, int]:
    """Return (features, projection head or None, D) of the ``backbone`` and ``neck`` of a config."""
    module = build_part(backbone, "backbone")
    pooling, projector = None, None
    if neck is not None:
        built = build_part(neck, "neck")
        if any(True for _ in built.parameters()):
            projector = NeckProjector(built)
        else:
            pooling = built
    width = feature_dim or (getattr(module, "feature_dim", None) if pooling is None else None)
    if isinstance(width, int) and not feature_dim and pooling is None:
        return module, projector, width
    features = Features(module, pooling)
    return features, projector, width or try_width(features, image_size)


@torch.no_grad()
def try_width(module: nn.Module, image_size: Size, channels: int | None = None) -> int:
    """Find the width of a module's output (N, D) by giving it one image of zeros, or a volume or signal of 32 a side."""
    first = next((m for m in module.modules() if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d))), None)
    channels = channels or (first.in_channels if first is not None else 3)
    shape: tuple[int, ...] = (channels, *sides("image_size", image_size))
    if first is not None and len(first.kernel_size) != 2:
        shape = (channels,) + (min(32, *shape[1:]),) * len(first.kernel_size)
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        width = int(module(torch.zeros(1, *shape)).shape[1])
    except Exception as error:
        raise ValueError(
            f"backbone: cannot find the width of its features with an image of {' x '.join(map(str, shape))}: "
            f"{error}. Give image_size=, or the width itself as feature_dim="
        ) from error
    finally:
        for part, mode in modes:
            part.training = mode
    return width


def initialise(module: nn.Module) -> None:
    """Call ``init_weights`` of the outermost parts that are MMEngine's, as MMEngine does in models of its own."""
    if isinstance(module, BaseModule):
        module.init_weights()
        return
    for child in module.children():
        initialise(child)
