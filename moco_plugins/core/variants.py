"""MoCo v1, v2, v2+ and v3: their settings, each with its source, and their heads.

v1: He et al. 2020, arXiv:1911.05722. v2: Chen et al. 2020, arXiv:2003.04297. v2+: v2 with the symmetric loss, as in the
authors' CIFAR-10 demonstration and Chen & He 2021, arXiv:2011.10566, table 4. v3: Chen, Xie & He 2021, arXiv:2104.02057.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .momentum import Cosine, Schedule


@dataclass(frozen=True)
class Variant:
    """The settings of one member of the family."""

    temperature: float
    momentum: Schedule
    queue_size: int
    projection_dim: int
    hidden_dim: int | None  #: None: as wide as the backbone's features
    projection_layers: int
    head_batch_norm: bool
    predictor: bool
    predictor_norm: bool  #: BatchNorm after the predictor's last layer, where heads have BatchNorm
    symmetric: bool
    in_batch_negatives: bool
    shuffle_bn: bool


V1 = Variant(
    temperature=0.07,  # section 3.3
    momentum=0.999,  # section 3.3
    queue_size=65536,  # section 4.1
    projection_dim=128,  # section 3.3
    hidden_dim=None,
    projection_layers=1,  # one fully-connected layer, section 3.3
    head_batch_norm=False,
    predictor=False,
    predictor_norm=True,
    symmetric=False,
    in_batch_negatives=False,
    shuffle_bn=True,  # section 3.3
)
V2 = Variant(
    temperature=0.2,  # section 3, best in the table of temperatures
    momentum=0.999,
    queue_size=65536,
    projection_dim=128,
    hidden_dim=None,  # 2048 for ResNet-50, section 3: the width of its features
    projection_layers=2,  # section 3
    head_batch_norm=False,
    predictor=False,
    predictor_norm=True,
    symmetric=False,
    in_batch_negatives=False,
    shuffle_bn=True,
)
V2_PLUS = Variant(**{**vars(V2), "symmetric": True})
V3 = Variant(
    temperature=0.2,  # section 4.1 (ViT); the authors' ResNet-50 runs use 1.0
    momentum=Cosine(0.99, 1.0),  # section 4.1
    queue_size=0,  # section 3: large batches instead
    projection_dim=256,  # section 4.1
    hidden_dim=4096,  # section 4.1
    projection_layers=3,  # section 4.1; the authors' ResNet-50 runs use 2
    head_batch_norm=True,
    predictor=True,  # section 3
    predictor_norm=True,
    symmetric=True,  # algorithm 1
    in_batch_negatives=True,  # algorithm 1
    shuffle_bn=False,
)
#: What the authors' code builds around a ResNet (facebookresearch/moco-v3, MoCo_ResNet and its README).
V3_RESNET = Variant(**{**vars(V3), "temperature": 1.0, "projection_layers": 2, "predictor_norm": False})
VARIANTS = {"v1": V1, "v2": V2, "v2+": V2_PLUS, "v3": V3, "v3-resnet": V3_RESNET}


def settle(variant: str, **given: Any) -> Variant:
    """The variant's settings with those that are given (not None) in their place."""
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r} is not one of {', '.join(VARIANTS)}")
    return replace(VARIANTS[variant], **{name: _plain(value) for name, value in given.items() if value is not None})


def _plain(value: Any) -> Any:
    """numpy's whole numbers are ours: what is saved and shown has no trace of them."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


def projection_head(
    in_dim: int, hidden_dim: int, out_dim: int, layers: int, batch_norm: bool, last_norm: bool = True
) -> nn.Sequential:
    """Build a projection (or prediction) head of ``layers`` linear layers: (N, in_dim) -> (N, out_dim).

    Without BatchNorm: Linear and ReLU in turn (v1, v2). With it, linear layers have no bias and each is followed by
    BatchNorm, the last one without scale and shift (v3), or not at all (``last_norm=False``).
    """
    head = nn.Sequential()
    for i in range(layers):
        last = i == layers - 1
        width = out_dim if last else hidden_dim
        head.append(nn.Linear(in_dim if i == 0 else hidden_dim, width, bias=not batch_norm))
        if batch_norm and (last_norm or not last):
            head.append(nn.BatchNorm1d(width, affine=not last))
        if not last:
            head.append(nn.ReLU(inplace=True))
    return head


def freeze_patch_projection(backbone: nn.Module) -> bool:
    """Freeze the patch projection of a vision transformer (v3, section 4.2); False where there is none.

    torchvision calls it ``conv_proj``, timm ``patch_embed.proj``, mmpretrain ``patch_embed.projection``.
    """
    for name, module in backbone.named_modules():
        if name.endswith(("conv_proj", "patch_embed.proj", "patch_embed.projection")):
            for parameter in module.parameters():
                parameter.requires_grad_(False)
            return True
    return False
