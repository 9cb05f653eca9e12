"""What the harness uses where nothing is asked for, by the kind of data; written into every report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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


def preset_for(channels: int, image_size: int) -> Preset:
    """Choose by the images: small grey ones, up to 64 pixels, larger."""
    if channels == 1 and image_size <= 32:
        return _SMALL
    return _MEDIUM if image_size <= 64 else _LARGE
