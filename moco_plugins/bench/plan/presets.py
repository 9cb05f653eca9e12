"""What the harness uses where nothing is asked for, by the kind of data; written into every report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.checks import queue_advice, suggested_queue_size
from ...sizes import Size, sides


@dataclass(frozen=True)
class Preset:
    """Defaults for one kind of data. ``options`` go to each method that has an option of that name."""

    backbone: str
    views: str
    epochs: int
    batch_size: int
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    view_options: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Options of one method only: method -> options.
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


# MoCo v3 has no queue. DINO's outputs are assignments, and the redundancy methods compare dimensions: all need many.
_OWN: dict[str, dict[str, Any]] = {
    "moco-v3": {"queue_size": 0},
    "dino": {"projection_dim": 1024},
    "barlow-twins": {"projection_dim": 1024},
    "vicreg": {"projection_dim": 1024},
}

# One width and one temperature for all methods. A queue of 65536 keys would hold each of 4000 images 16 times over, and
# a momentum of 0.999 would be the memory of a thousand steps where there are about as many in all.
_SMALL = Preset(
    backbone="convnet",
    views="affine",
    epochs=25,
    batch_size=64,
    options={"queue_size": 1024, "momentum": 0.99, "temperature": 0.2, "projection_dim": 64, "hidden_dim": 512},
    method_options=_OWN,
)
_MEDIUM = Preset(
    backbone="resnet18-cifar",
    views="v2",
    epochs=200,
    batch_size=256,
    learning_rate=1e-3,
    options={"queue_size": 4096, "momentum": 0.99, "projection_dim": 128},
    method_options=_OWN,
)
_LARGE = Preset(
    backbone="resnet18",
    views="v2",
    epochs=100,
    batch_size=256,
    learning_rate=1e-3,
    options={"queue_size": 16384, "projection_dim": 128},
    method_options=_OWN,
)


#: With ``--views own``: the views of each method's paper, as far as the core has them; all others get v2.
OWN_VIEWS = {"moco-v1": "v1", "moco-v3": "v3", "byol": "v3", "barlow-twins": "v3", "vicreg": "v3", "dino": "v3"}


#: Steps an epoch has at least, where batches of 16 images and more can give them; and the memory of a momentum of 0.999.
_STEPS, _SMALLEST_BATCH, _LONG_MEMORY = 8, 16, 10_000


def preset_for(channels: int, image_size: Size, images: int) -> Preset:
    """Choose by the images: small grey ones, up to 64 pixels, larger; and by how many there are.

    Where there are few, batches are smaller, so that there are steps to learn in; the queue stays smaller than the set, and
    the key encoder keeps no more of the past than the training has.
    """
    longer = max(sides("image_size", image_size))
    preset = _LARGE if longer > 64 else _MEDIUM
    if channels == 1 and longer <= 32:
        preset = _SMALL
    batch, options = preset.batch_size, dict(preset.options)
    while batch > _SMALLEST_BATCH and images < _STEPS * batch:
        batch //= 2
    batch = min(batch, images)
    if queue_advice(options["queue_size"], images):
        options["queue_size"] = suggested_queue_size(images)
    if preset.epochs * images / batch < _LONG_MEMORY:
        options.setdefault("momentum", 0.99)
    return replace(preset, batch_size=batch, options=options)
