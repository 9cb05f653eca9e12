"""Our own: ``MoCo.state_dict()`` wherever it lies, and the backbones that ``bench`` and ``pretrain`` keep."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..sizes import Size
from .architectures import Architecture
from .formats import Format
from .reading import Content
from .weights import Weights

#: Where a MoCo lies in a state dict: bare, in MoCoModule, in the MMEngine model, in both.
_PREFIXES = ("", "moco.", "method.", "model.moco.", "model.method.", "model.")
_KEPT = ("mean", "std", "method", "seed", "epoch")


def read_moco(content: Content) -> Weights | None:
    """A MoCo: bare, or in a LightningModule, an MMEngine model or another wrapper."""
    prefix = next((p for p in _PREFIXES if content.has(f"{p}query_encoder.backbone.", f"{p}key_encoder.")), None)
    if prefix is None:
        return None
    keys = content.pop(f"{prefix}queue.keys")
    filled, ptr, steps = (content.pop(prefix + name) for name in ("queue.filled", "queue.ptr", "steps"))
    content.pop(f"{prefix}queue.skipped")
    return Weights(
        "",
        backbone=content.take(f"{prefix}query_encoder.backbone."),
        projector=content.take(f"{prefix}query_encoder.projector."),
        predictor=content.take(f"{prefix}predictor."),
        key_backbone=content.take(f"{prefix}key_encoder.backbone."),
        key_projector=content.take(f"{prefix}key_encoder.projector."),
        queue=keys,
        queue_ptr=int(ptr) if ptr is not None else 0,
        queue_filled=int(filled) if filled is not None else None,
        steps=int(steps) if steps is not None else None,
        architecture=_told(content),
        about=_about(content.raw),
    )


def read_method(content: Content) -> Weights | None:
    """Another method of the harness (SimCLR, BYOL, ...): an encoder of backbone and projector."""
    prefix = next((p for p in _PREFIXES if content.has(f"{p}encoder.backbone.", f"{p}encoder.projector.")), None)
    if prefix is None:
        return None
    backbone, projector = content.take(f"{prefix}encoder.backbone."), content.take(f"{prefix}encoder.projector.")
    return Weights("", backbone, projector, architecture=_told(content), about=_about(content.raw))


def read_parts(content: Content) -> Weights | None:
    """What ``convert --to safetensors`` writes: a backbone, or parts with their names before them."""
    if content.about.get("format") != "moco-plugins":
        return None
    about = {**json.loads(content.about.get("about", "{}")), "from": content.about.get("from", "")}
    if content.about.get("part", "backbone") == "backbone":
        return Weights("", content.take(""), architecture=_told(content), about=about)
    found: dict[str, Any] = {part: content.take(f"{part}.") for part in _STATES}
    keys, ptr, filled, steps = (content.pop(name) for name in ("queue", "queue_ptr", "queue_filled", "steps"))
    return Weights(
        "",
        **found,
        queue=keys,
        queue_ptr=0 if ptr is None else int(ptr),
        queue_filled=None if filled is None else int(filled),
        steps=None if steps is None else int(steps),
        architecture=_told(content),
        about=about,
    )


_STATES = ("backbone", "projector", "predictor", "key_backbone", "key_projector")


def read_kept(content: Content) -> Weights | None:
    """A backbone with the name of its network beside it, as ``bench`` and ``pretrain`` keep it."""
    told = _told(content, hyper_parameters=False)
    if told is None or content.about.get("format") == "moco-plugins" or content.has("query_encoder."):
        return None
    if any(name.startswith(("moco.", "method.", "encoder.backbone.")) for name in content.state):
        return None
    return Weights("", content.take(""), architecture=told, about=_about({**content.raw, **content.about}))


def _told(content: Content, hyper_parameters: bool = True) -> Architecture | None:
    """The architecture that a file names: ``backbone``, ``channels``, ``image_size`` of bench, pretrain and MoCoModule."""
    hyper = content.raw.get("hyper_parameters") if hyper_parameters else None
    for place in (content.raw, content.about, hyper if isinstance(hyper, Mapping) else {}):
        name = place.get("backbone") or place.get("architecture")
        if isinstance(name, str) and name:
            options = place.get("options", {})
            if isinstance(options, str):
                options = _number_pairs(options)
            return Architecture(name, int(place.get("channels", 3)), _size(place.get("image_size", 224)), options)
    return None


def _size(told: Any) -> Size:
    """224, "224", (224, 448) or "224x448"."""
    both = told.split("x") if isinstance(told, str) else told if isinstance(told, (list, tuple)) else [told]
    numbers = [int(number) for number in both]
    return numbers[0] if len(numbers) == 1 else (numbers[0], numbers[1])


def _number_pairs(text: str) -> dict[str, Any]:
    """``a=1,b=2e-6`` -> numbers; text is all that a safetensors file keeps."""
    pairs = (pair.split("=") for pair in text.split(",") if pair)
    return {name: int(value) if value.isdigit() else float(value) for name, value in pairs}


def _about(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: raw[name] for name in _KEPT if isinstance(raw.get(name), (str, int, float, list))}


def metadata(weights: Weights, part: str) -> dict[str, str]:
    """What a safetensors file says beside its tensors: texts."""
    told = {"format": "moco-plugins", "part": part, "from": weights.format, "about": json.dumps(dict(weights.about))}
    if weights.architecture is not None:
        network = weights.architecture
        size = network.image_size
        shown = str(size) if isinstance(size, int) else f"{size[0]}x{size[1]}"
        told |= {"architecture": network.name, "channels": str(network.channels), "image_size": shown}
        if network.options:
            told["options"] = ",".join(f"{name}={value}" for name, value in network.options.items())
    return told


def write_safetensors(weights: Weights, path: Path, part: str) -> None:
    """A backbone under its library's names; an encoder or all with the parts' names before them."""
    from .reading import need_safetensors

    need_safetensors()
    from safetensors.torch import save_file

    if part == "backbone":
        state = dict(weights.backbone)
    else:
        names = _STATES if part == "all" else ("backbone", "projector")
        state = {f"{name}.{key}": value for name in names for key, value in getattr(weights, name).items()}
        if part == "all":
            state |= _numbers(weights)
    save_file(
        {name: value.detach().contiguous().clone() for name, value in state.items()}, path, metadata(weights, part)
    )
    path.chmod(0o666 & ~_umask())  # safetensors makes files that only their owner reads


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _numbers(weights: Weights) -> dict[str, Tensor]:
    state = {} if weights.steps is None else {"steps": torch.tensor(weights.steps)}
    if weights.queue is not None:
        filled = len(weights.queue) if weights.queue_filled is None else weights.queue_filled
        ptr = torch.tensor(weights.queue_ptr)
        state |= {"queue": weights.queue, "queue_ptr": ptr, "queue_filled": torch.tensor(filled)}
    return state


FORMATS = {
    "moco-plugins": Format("MoCo.state_dict(), MoCoModule's and MMEngine's checkpoints", read_moco),
    "moco-plugins-method": Format("other methods of this harness", read_method),
    "moco-plugins-backbone": Format("backbones that bench and pretrain keep", read_kept),
    "safetensors": Format(
        "tensors with their architecture beside them",
        read_parts,
        write=write_safetensors,
        parts=("backbone", "encoder", "all"),
    ),
}
