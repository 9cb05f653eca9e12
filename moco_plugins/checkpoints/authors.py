"""The authors' code: facebookresearch/moco (v1 and v2) and facebookresearch/moco-v3."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .architectures import Architecture
from .dialects import TIMM_VIT
from .formats import Format
from .reading import Content
from .weights import Weights

#: In moco-v3 the small vision transformer has 12 heads, in timm 6; shapes do not tell.
SMALL_HEADS = 12


def read_moco(content: Content) -> Weights | None:
    """v1 and v2: two encoders whose ``fc`` is the head, and a queue of (D, K)."""
    if (
        not content.has("encoder_q.conv1.")
        and not content.has("encoder_q.patch_embed.")
        and not content.has("encoder_q.fc.")
    ):
        return None
    queue, ptr = content.pop("queue"), content.pop("queue_ptr")
    backbone, projector = _apart(content.take("encoder_q."))
    key_backbone, key_projector = _apart(content.take("encoder_k."))
    return Weights(
        "",
        backbone,
        projector,
        key_backbone=key_backbone,
        key_projector=key_projector,
        queue=None if queue is None else queue.T.contiguous(),
        queue_ptr=0 if ptr is None else int(ptr),
        about=_epoch(content),
    )


def read_v3(content: Content) -> Weights | None:
    """v3: base and momentum encoder whose ``fc`` (ResNet) or ``head`` (ViT) is the head, and a predictor."""
    known = ("base_encoder.", "momentum_encoder.", "predictor.")
    if not content.has("base_encoder.") or content.has("base_encoder.0."):
        return None
    if not all(name.startswith(known) for name in content.state):
        return None
    backbone, projector = _apart(content.take("base_encoder."))
    key_backbone, key_projector = _apart(content.take("momentum_encoder."))
    return Weights(
        "",
        backbone,
        projector,
        content.take("predictor."),
        key_backbone,
        key_projector,
        architecture=small_heads(backbone),
        about=_epoch(content),
        notes=("moco-v3's loss is 2 T times ours, summed over both directions where ours is their mean",),
    )


def small_heads(backbone: dict[str, Tensor]) -> Architecture | None:
    """The option that the shapes of a small vision transformer do not tell."""
    token = backbone.get("cls_token")
    small = token is not None and token.shape[-1] == 384
    return Architecture("", options={"num_heads": SMALL_HEADS}) if small else None


def _apart(encoder: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    head = {name: value for name, value in encoder.items() if name.startswith(("fc.", "head."))}
    backbone = {name: value for name, value in encoder.items() if name not in head}
    return backbone, {name.partition(".")[2]: value for name, value in head.items()}


def _epoch(content: Content) -> dict[str, object]:
    return {name: content.raw[name] for name in ("epoch", "arch") if isinstance(content.raw.get(name), (int, str))}


def write_moco(weights: Weights, path: Path, part: str) -> None:
    """Write what the authors' ``main_lincls.py`` takes: v1 and v2's layout, or with a predictor or for a ViT v3's.

    Of "encoder" there is the query encoder; of "all" the key encoder and the queue as well.
    """
    v3 = bool(weights.predictor) or (weights.queue is None and TIMM_VIT.speaks(weights.backbone))
    query, key = ("base_encoder", "momentum_encoder") if v3 else ("encoder_q", "encoder_k")
    head = "head" if TIMM_VIT.speaks(weights.backbone) else "fc"
    state = {f"{query}.{name}": value for name, value in weights.backbone.items()}
    if part != "backbone":
        state |= _head(f"{query}.{head}", weights.projector)
    if part == "all":
        state |= {f"{key}.{name}": value for name, value in weights.key_backbone.items()}
        state |= _head(f"{key}.{head}", weights.key_projector)
        state |= {f"predictor.{name}": value for name, value in weights.predictor.items()}
        if weights.queue is not None:
            state |= {"queue": weights.queue.T.contiguous(), "queue_ptr": torch.tensor([weights.queue_ptr])}
    name = weights.architecture.name if weights.architecture else "unknown"
    epoch = weights.about.get("epoch", 0)
    torch.save({"epoch": epoch, "arch": name, "state_dict": {f"module.{name}": v for name, v in state.items()}}, path)


def _head(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    single = {name for name in state if not name.startswith("0.")} == set()
    return {f"{prefix}.{name.removeprefix('0.') if single else name}": value for name, value in state.items()}


FORMATS = {
    "moco": Format(
        "facebookresearch/moco (v1, v2); written: v3's too",
        read_moco,
        write=write_moco,
        parts=("all", "encoder", "backbone"),
    ),
    "moco-v3": Format("facebookresearch/moco-v3", read_v3),
}
