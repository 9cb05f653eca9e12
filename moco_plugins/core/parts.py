"""The encoders of a MoCo, from its settings."""

from __future__ import annotations

import copy

from torch import nn

from ..steps.pairing import copy_module
from .checks import second_backbone
from .encoder import Encoder
from .variants import Variant, freeze_patch_projection, projection_head


def build_encoders(
    backbone: nn.Module,
    feature_dim: int,
    settings: Variant,
    projector: nn.Module | None,
    key_encoder: nn.Module | None,
    freeze_patches: bool | None,
) -> tuple[Encoder, nn.Module | None, Encoder]:
    """Return (query encoder, predictor or None, key encoder); the key encoder is equal to the first and not trained.

    ``projector`` and ``key_encoder`` are the user's own, where there are any; ``freeze_patches`` None: leave them.
    """
    hidden, dim, norm = settings.hidden_dim or feature_dim, settings.projection_dim, settings.head_batch_norm
    if freeze_patches is not None:
        _freeze_patches(backbone, required=freeze_patches)
    if projector is None:
        projector = projection_head(feature_dim, hidden, dim, settings.projection_layers, norm)
    query = Encoder(backbone, projector, feature_dim)
    predictor = projection_head(dim, hidden, dim, 2, norm, settings.predictor_norm) if settings.predictor else None
    key = Encoder(second_backbone(backbone, key_encoder), copy.deepcopy(projector), feature_dim)
    key.requires_grad_(False)
    copy_module(query, key)
    return query, predictor, key


def place_like(backbone: nn.Module, *parts: nn.Module | None) -> None:
    """Put new parts on the backbone's device and in its precision; a queue keeps float32 where that is half."""
    like = next((p for p in backbone.parameters() if p.is_floating_point()), None)
    for part in parts:
        if part is not None and like is not None:
            part.to(like.device, like.dtype)


def _freeze_patches(backbone: nn.Module, required: bool) -> None:
    if not freeze_patch_projection(backbone) and required:
        raise ValueError(
            f"freeze_patch_projection=True: {type(backbone).__name__} has no layer called conv_proj or patch_embed.proj"
        )
