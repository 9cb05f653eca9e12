"""What must be beaten: raw pixels, and the backbone before any training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...data.images import as_batch
from ...sizes import at_most
from ..plan.data import Data
from ..plan.settings import Settings
from .recipe import build_seeded_backbone
from .scores import evaluate, score

RAW, UNTRAINED = "raw-pixels", "untrained"
#: Raw pixels of large images are scaled down to this side: distances between pixels gain nothing from more.
RAW_SIDE = 32


def baselines(settings: Settings, data: Data, seed: int, raw: bool) -> list[dict[str, Any]]:
    """The records of the baselines of one seed; ``raw``: raw pixels too; a split has the same for every seed."""
    found = []
    if raw:
        found.append({"method": RAW, "label": RAW, "seed": seed, **raw_pixels(settings, data, seed)})
    backbone, _ = build_seeded_backbone(settings, data, seed)
    scores, _ = evaluate(backbone, settings, data, seed, settings.methods[0])
    return [*found, {"method": UNTRAINED, "label": UNTRAINED, "seed": seed, **scores}]


def raw_pixels(settings: Settings, data: Data, seed: int) -> dict[str, Any]:
    """The scores of the images themselves."""
    train, test = (_pixels(part, data) for part in (data.train, data.test))
    return score(train, test, settings, data, seed)


def _pixels(images: Any, data: Data) -> tuple[Tensor, Tensor]:
    side = at_most(data.image_size, RAW_SIDE)
    parts = [as_batch(images, range(i, min(i + 500, len(images))), side) for i in range(0, len(images), 500)]
    return torch.cat([batch.flatten(1) for batch, _ in parts]), torch.cat([labels for _, labels in parts])
