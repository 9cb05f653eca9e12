"""Weights of anybody as backbones that can be judged: built, normalised as they were trained, scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...backbones import build_backbone
from ...checkpoints import Weights
from ...core.views import IMAGENET_MEAN, IMAGENET_STD
from ...data.seeding import key, random_state
from ...evaluation import finetune
from ..plan.data import Data
from ..plan.errors import SettingsError
from ..plan.presets import preset_for
from ..plan.settings import Settings
from .baselines import RAW, UNTRAINED, raw_pixels
from .recipe import Normalise
from .scores import evaluate
from .weights import read_weights

#: Formats that tell the size of the images they were trained at.
_TELL_SIZE = ("moco-plugins-backbone", "safetensors")


@dataclass(frozen=True)
class Judged:
    """One file of weights: its name in tables, the backbone built of it, and the data as it wants them."""

    label: str
    path: str
    weights: Weights
    backbone: nn.Module
    feature_dim: int
    name: str
    data: Data
    notes: tuple[str, ...]


def open_all(paths: Sequence[str], settings: Settings, data: Data) -> list[Judged]:
    """Build the backbones of all files, before any is judged.

    Raises:
        SettingsError, ValueError, OSError: one cannot be read, is of no known network, or cannot take such images.
    """
    if len({str(Path(path).resolve()) for path in paths}) < len(paths):
        raise SettingsError(f"{' '.join(paths)}: a file is named twice")
    return [_open(path, label, settings, data) for path, label in zip(paths, labels_of(paths), strict=True)]


def labels_of(paths: Sequence[str]) -> list[str]:
    """Short names that differ: of a file its own without the ending, of our folders theirs; else the paths."""
    short = []
    for path in map(Path, paths):
        names = [part for part in path.resolve().with_suffix("").parts if part not in ("weights", "backbone")]
        short.append(names[-1] if names else str(path))
    return short if len(set(short)) == len(short) else [str(path) for path in paths]


def _open(path: str, label: str, settings: Settings, data: Data) -> Judged:
    weights = read_weights(path)
    network = weights.architecture
    if network is None and settings.backbone is None:
        first = ", ".join(list(weights.backbone)[:3])
        raise SettingsError(
            f"{path}: these weights fit no backbone that is known (they have {first}); name what they are of with --backbone"
        )
    if settings.backbone is not None and network is None:
        weights = weights.with_architecture(settings.backbone)
        network = weights.architecture
    assert network is not None
    if network.channels != data.channels:
        raise SettingsError(
            f"{path}: {network.name} with these weights takes images of {network.channels} channels, and those of "
            f"{data.name} have {data.channels}"
        )
    told = weights.format in _TELL_SIZE or any(
        name.endswith(("pos_embed", "pos_embedding")) for name in weights.backbone
    )
    size = settings.image_size or (network.image_size if told else data.image_size)
    backbone, width = weights.build_backbone(size)
    mean, std = (_numbers(weights.about.get(name), data.channels) for name in ("mean", "std"))
    if mean is None or std is None:
        mean, std = (IMAGENET_MEAN, IMAGENET_STD) if data.channels == 3 else (data.mean, data.std)
    left = f"left out: {', '.join(weights.left[:4])}{' ...' * (len(weights.left) > 4)}"
    notes = (*weights.notes, *([left] if weights.left else []))
    as_wanted = replace(data, image_size=size, mean=mean, std=std)
    backbone = backbone.to(memory_format=torch.channels_last).eval()
    return Judged(label, path, weights, backbone, width, network.name, as_wanted, notes)


def _numbers(value: Any, count: int) -> tuple[float, ...] | None:
    fits = isinstance(value, (list, tuple)) and len(value) == count
    return tuple(map(float, value)) if fits else None


def judge(one: Judged, settings: Settings) -> dict[str, Any]:
    """The record of one file: what it is, and its scores."""
    device = torch.device(_device(settings.device))
    scores, _ = evaluate(one.backbone.to(device), _settings(one, settings), one.data, 0, "moco-v2")
    scores |= _finetuned(one.backbone, one.feature_dim, one.data, settings)
    return {
        "method": one.label,
        "label": one.label,
        "engine": "",
        "seed": 0,
        "status": "finished",
        "path": one.path,
        "format": one.weights.format,
        "backbone": one.name,
        "image_size": one.data.image_size,
        "backbone_parameters": sum(p.numel() for p in one.backbone.parameters()),
        "options": {
            "file": one.path,
            "format": one.weights.format,
            "backbone": one.name,
            "image size": one.data.image_size,
        },
        **scores,
    }


def _finetuned(backbone: nn.Module, width: int, data: Data, settings: Settings) -> dict[str, float]:
    if not settings.finetune:
        return {}
    finish = Normalise(data.mean, data.std)
    found = finetune(backbone, width, data.train, data.test, finish, data.image_size, settings.finetune)
    return {f"finetune_{data.measure}": found.score}


def untrained_and_raw(judged: Sequence[Judged], settings: Settings) -> list[dict[str, Any]]:
    """What must be beaten: raw pixels, and each kind of backbone before any training."""
    found = [{"method": RAW, "label": RAW, "seed": 0, **raw_pixels(settings, judged[0].data, 0)}]
    kinds = {(one.name, one.data.image_size): one for one in judged}
    for one in kinds.values():
        with random_state(key(0, "backbone")):
            fresh, width = build_backbone(one.name, one.data.channels, one.data.image_size)
        fresh = fresh.to(_device(settings.device))
        scores, _ = evaluate(fresh, _settings(one, settings), one.data, 0, "moco-v2")
        scores |= _finetuned(fresh, width, one.data, settings)
        of = "" if len(kinds) == 1 else f" {one.name} at {one.data.image_size}"
        found.append({"method": UNTRAINED, "label": f"{UNTRAINED}{of}", "seed": 0, **scores})
    return found


def _settings(one: Judged, settings: Settings) -> Settings:
    """Settings with the views that tell the alignment."""
    views = preset_for(one.data.channels, one.data.image_size, len(one.data.train)).views
    return replace(settings, views=views, image_size=one.data.image_size)


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
