"""Checkpoints of OpenMMLab: mmselfsup 0.x and 1.x, mmpretrain 1.x, and whatever takes an ``init_cfg``. Read and written.

Nothing of MMEngine is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moco_plugins.checkpoints import Architecture, Content, Dialect, Format, Weights
from moco_plugins.checkpoints.dialects import vit_rules

from .log_history import harmless

#: mmpretrain's VisionTransformer (mmcls 0.x has the same).
VIT = Dialect(
    "mmpretrain",
    "vit",
    vit_rules(
        "cls_token",
        "pos_embed",
        "patch_embed.projection.*",
        "layers.{i}.ln1.*",
        "layers.{i}.attn.proj.*",
        "layers.{i}.ln2.*",
        "layers.{i}.ffn.layers.0.0.*",
        "layers.{i}.ffn.layers.1.*",
        "ln1.*",
        qkv="layers.{i}.attn.qkv.*",
    ),
)
#: (query backbone, query neck, key backbone, key neck, predictor, names of the same tensors again), newest first.
_LAYOUTS = (
    ("backbone.", "neck.", "encoder_k.module.0.", "encoder_k.module.1.", "", ()),
    ("backbone.", "neck.", "momentum_encoder.module.0.", "momentum_encoder.module.1.", "head.predictor.", ()),
    ("encoder_q.0.", "encoder_q.1.", "encoder_k.0.", "encoder_k.1.", "", ("backbone.", "neck.")),
    (
        "base_encoder.0.",
        "base_encoder.1.",
        "momentum_encoder.0.",
        "momentum_encoder.1.",
        "head.predictor.",
        ("backbone.", "neck."),
    ),
)


def read(content: Content) -> Weights | None:
    """MoCo or MoCo v3 of mmselfsup and mmpretrain, or a backbone with a classifier's or other head."""
    layout = next((layout for layout in _LAYOUTS if content.has(layout[0], layout[2])), None)
    if layout is None:
        others = ("neck.", "head.", "data_preprocessor.")
        told = isinstance(content.raw.get("meta"), Mapping) or any(content.has(other) for other in others)
        if (
            not told
            or not content.has("backbone.")
            or not all(name.startswith(("backbone.", *others)) for name in content.state)
        ):
            return None
        return Weights("", content.take("backbone."), content.take("neck."), about=_about(content))
    backbone, neck, key_backbone, key_neck, predictor, again = layout
    for prefix in again:
        content.take(prefix)
    queue, ptr = content.pop("queue"), content.pop("queue_ptr")
    steps = content.pop("encoder_k.steps" if not predictor else "momentum_encoder.steps")
    if steps is None:
        steps = _meta(content).get("iter")
    weights = content.take(backbone)
    return Weights(
        "",
        weights,
        content.take(neck),
        content.take(predictor) if predictor else {},
        content.take(key_backbone),
        content.take(key_neck),
        queue=None if queue is None else queue.T.contiguous(),
        queue_ptr=0 if ptr is None else int(ptr),
        steps=None if steps is None else int(steps),
        # mmpretrain's mocov3-small has 12 heads, as the authors' code; its shapes are those of timm's with 6.
        architecture=Architecture("", options={"num_heads": 12}) if predictor and _width(weights) == 384 else None,
        about=_about(content),
    )


def _width(backbone: Mapping[str, Tensor]) -> int | None:
    return backbone["cls_token"].shape[-1] if "cls_token" in backbone else None


def _meta(content: Content) -> Mapping[str, Any]:
    meta = content.raw.get("meta")
    return meta if isinstance(meta, Mapping) else {}


def _about(content: Content) -> dict[str, Any]:
    return {name: _meta(content)[name] for name in ("epoch",) if isinstance(_meta(content).get(name), int)}


def write(weights: Weights, path: Path, part: str) -> None:
    """Write what ``init_cfg=dict(type='Pretrained', checkpoint=..., prefix='backbone.')`` takes; "all" is mmpretrain's MoCo."""
    state = {f"backbone.{name}": value for name, value in _names(weights.backbone).items()}
    if part != "backbone":
        state |= {f"neck.{name}": value for name, value in _neck_names(weights.projector).items()}
    if part == "all":
        key = "momentum_encoder.module" if weights.predictor else "encoder_k.module"
        state |= {f"{key}.0.{name}": value for name, value in _names(weights.key_backbone).items()}
        state |= {f"{key}.1.{name}": value for name, value in _neck_names(weights.key_projector).items()}
        state |= {f"head.predictor.{name}": value for name, value in _neck_names(weights.predictor).items()}
        if weights.key_backbone:
            state[f"{key.removesuffix('.module')}.steps"] = torch.tensor(weights.steps or 0)
        if weights.queue is not None:
            state |= {"queue": weights.queue.T.contiguous(), "queue_ptr": torch.tensor([weights.queue_ptr])}
    meta = {"architecture": str(weights.architecture or ""), "from": weights.format}
    torch.save({"meta": meta, "state_dict": state}, path)


def _names(backbone: dict[str, Tensor]) -> dict[str, Tensor]:
    from moco_plugins.checkpoints.names import dialect_of, in_dialect

    spoken = dialect_of(backbone)
    return in_dialect(backbone, VIT) if spoken is not None and spoken.family == "vit" else backbone


def _neck_names(head: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of LinearNeck (v1), MoCoV2Neck (v2) or NonLinearNeck (v3)."""
    linear = [name for name, value in head.items() if name.endswith("weight") and value.ndim == 2]
    if len(linear) == 1 and len(head) <= 2:
        return {name.replace("0.", "fc.", 1): value for name, value in head.items()}
    if not any(name.endswith("running_mean") for name in head):
        return {f"mlp.{name}": value for name, value in head.items()}
    named: dict[str, Tensor] = {}
    for name, value in head.items():
        place, leaf = name.split(".")
        kind = "fc" if f"{place}.running_mean" not in head else "bn"  # Linear 0, 3, 6; BatchNorm 1, 4, 7
        named[f"{kind}{int(place) // 3}.{leaf}"] = value
    return named


FORMATS = {
    "mmengine": Format(
        "mmselfsup 0.x and 1.x, mmpretrain 1.x, MMEngine",
        read,
        write=write,
        parts=("backbone", "encoder", "all"),
        dialects=(VIT,),
        harmless=harmless,
    )
}
