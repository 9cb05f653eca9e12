"""What network a backbone's tensors are of, told by their names and shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..backbones import build_backbone
from ..sizes import Size
from .dialects import TIMM_VIT, TORCHVISION_RESNET, TORCHVISION_VIT

_RESNETS: dict[tuple[str, tuple[int, ...], int, int], str] = {
    ("basic", (2, 2, 2, 2), 64, 1): "resnet18",
    ("basic", (3, 4, 6, 3), 64, 1): "resnet34",
    ("bottleneck", (3, 4, 6, 3), 64, 1): "resnet50",
    ("bottleneck", (3, 4, 23, 3), 64, 1): "resnet101",
    ("bottleneck", (3, 8, 36, 3), 64, 1): "resnet152",
    ("bottleneck", (3, 4, 6, 3), 128, 1): "wide_resnet50_2",
    ("bottleneck", (3, 4, 23, 3), 128, 1): "wide_resnet101_2",
    ("bottleneck", (3, 4, 6, 3), 128, 32): "resnext50_32x4d",
    ("bottleneck", (3, 4, 23, 3), 256, 32): "resnext101_32x8d",
    ("bottleneck", (3, 4, 23, 3), 256, 64): "resnext101_64x4d",
}
#: width, depth -> timm's word for it
_VITS = {(192, 12): "tiny", (384, 12): "small", (768, 12): "base", (1024, 24): "large", (1280, 32): "huge"}
_TORCHVISION_VITS = {"base": "b", "large": "l", "huge": "h"}
#: Classifiers, which no backbone has: torchvision's, timm's, Hugging Face's.
_CLASSIFIER = re.compile(r"(fc|classifier|heads|head\.fc|head_dist)\..+|head\.(weight|bias)|last_linear\..+")
#: A name that tells a family of timm's, and the models of it.
_TIMM_FAMILIES = {"stages.0.blocks.0.conv_dw.weight": "convnext*", "layers.0.blocks.0.attn.qkv.weight": "swin*"}


@dataclass(frozen=True)
class Architecture:
    """A network that :func:`moco_plugins.backbones.build_backbone` builds.

    Args:
        name: as ``build_backbone`` takes it.
        channels, image_size: of its images; the size is known of networks with position embeddings, and a habit elsewhere.
        options: where the network differs from the library's: ``num_heads``, ``norm_eps`` (of LayerNorm), ``stem_padding``.
    """

    name: str
    channels: int = 3
    image_size: Size = 224
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, image_size: Size | None = None) -> tuple[nn.Module, int]:
        """Build the network; see :func:`moco_plugins.backbones.build_backbone`."""
        model, width = build_backbone(self.name, self.channels, image_size or self.image_size)
        for option, value in self.options.items():
            _OPTIONS[option](model, value)
        return model, width

    def __str__(self) -> str:
        own = "".join(f", {option}={value}" for option, value in self.options.items())
        return f"{self.name} ({self.channels} channels, {self.image_size} px{own})"


def _heads(model: nn.Module, count: int) -> None:
    module: Any
    for module in model.modules():
        if hasattr(module, "num_heads") and hasattr(module, "head_dim"):
            width = module.num_heads * module.head_dim
            module.num_heads, module.head_dim = count, width // count
            if hasattr(module, "scale"):
                module.scale = (width // count) ** -0.5


def _norm_eps(model: nn.Module, eps: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = eps


def _stem_padding(model: nn.Module, padding: int) -> None:
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    first.padding = (padding, padding)


_OPTIONS = {"num_heads": _heads, "norm_eps": _norm_eps, "stem_padding": _stem_padding}


def without_classifier(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Part a network's tensors into backbone and classifier."""
    heads = {name: value for name, value in state.items() if _CLASSIFIER.fullmatch(name)}
    return {name: value for name, value in state.items() if name not in heads}, heads


def guess(state: Mapping[str, Tensor]) -> Architecture | None:
    """Tell the network from a backbone's tensors, which have the names of their library; None where it is not known."""
    if TORCHVISION_RESNET.speaks(state) and "conv1.weight" in state:
        return _resnet(state)
    if TIMM_VIT.speaks(state) and "pos_embed" in state:
        return _vit(state, lambda size, patch: f"timm/vit_{size}_patch{patch}_224")
    if TORCHVISION_VIT.speaks(state):
        letter = _TORCHVISION_VITS
        return _vit(
            TORCHVISION_VIT.to_ours(state), lambda size, p: f"vit_{letter[size]}_{p}" if size in letter else None
        )
    if state.get("0.weight") is not None and "7.running_mean" in state and len(state) == 18:
        first = state["0.weight"]
        return Architecture("convnet", first.shape[1], 32) if first.shape[0] == 32 and first.ndim == 4 else None
    return _by_trying(state)


def _resnet(state: Mapping[str, Tensor]) -> Architecture | None:
    depths = tuple(len({name.split(".")[1] for name in state if name.startswith(f"layer{i}.")}) for i in range(1, 5))
    second = state.get("layer1.0.conv2.weight")
    if second is None:
        return None
    kind = "bottleneck" if "layer1.0.conv3.weight" in state else "basic"
    name = _RESNETS.get((kind, depths, second.shape[0], second.shape[0] // second.shape[1]))
    stem = state["conv1.weight"]
    if name is None or stem.shape[0] != 64:
        return None
    small = stem.shape[-1] == 3
    return (
        Architecture(name + "-cifar" * small, stem.shape[1], 32 if small else 224) if stem.shape[-1] in (3, 7) else None
    )


def _vit(state: Mapping[str, Tensor], naming: Any) -> Architecture | None:
    depth = len({name.split(".")[1] for name in state if name.startswith("blocks.")})
    patches, width = state["patch_embed.proj.weight"], state["pos_embed"].shape[-1]
    side = math.isqrt(state["pos_embed"].shape[1] - 1)
    size = _VITS.get((width, depth))
    if size is None or patches.ndim != 4 or side * side != state["pos_embed"].shape[1] - 1:
        return None
    name = naming(size, patches.shape[-1])
    return Architecture(name, patches.shape[1], side * patches.shape[-1]) if name else None


def _by_trying(state: Mapping[str, Tensor]) -> Architecture | None:
    """Compare with the models of the libraries, built without memory."""
    shapes = {name: value.shape for name, value in state.items()}
    first = next((value for value in state.values() if value.ndim == 4), None)
    channels = first.shape[1] if first is not None and first.shape[1] <= 4 else 3
    for name in _candidates(shapes):
        try:
            with torch.device("meta"):
                model = _empty(name)
        except Exception:  # a model that cannot be built without images is not recognised
            continue
        built, _ = without_classifier(model.state_dict())
        if built.keys() == shapes.keys() and all(
            v.shape == shapes[n] or (v.ndim == 4 and v.shape[2:] == shapes[n][2:] and shapes[n][1] == channels)
            for n, v in built.items()
        ):
            return Architecture(name, channels)
    return None


def _candidates(shapes: Mapping[str, Any]) -> Iterable[str]:
    from torchvision import models

    if any(name.startswith(("features.", "layers.", "conv")) for name in shapes):
        yield from models.list_models(module=models)
    for marker, family in _TIMM_FAMILIES.items():
        if marker in shapes:
            try:
                import timm
            except ModuleNotFoundError:
                return
            yield from (f"timm/{name}" for name in timm.list_models(family))


def _empty(name: str) -> nn.Module:
    if name.startswith("timm/"):
        import timm

        model: nn.Module = timm.create_model(name.removeprefix("timm/"), num_classes=0)
        return model
    from torchvision import models

    extra = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    built: nn.Module = models.get_model(name, weights=None, **extra)
    return built
