"""How a method is optimised: the recipe that all share, or each paper's, scaled to the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .errors import SettingsError

if TYPE_CHECKING:
    from .presets import Preset
    from .settings import Settings

OPTIMIZERS = ("adamw", "sgd", "lars")
RECIPES = ("common", "own")
#: Settings that a run may have of its own.
OF_A_RUN = ("learning_rate", "weight_decay", "batch_size", "optimizer", "schedule")

#: Learning rate of a batch of 256 and weight decay, where an optimiser is asked for and nothing else: MoCo (SGD), MoCo v3
#: with ResNets (LARS). AdamW has the preset's.
_DEFAULTS: dict[str, tuple[float, float]] = {"sgd": (0.03, 1e-4), "lars": (0.3, 1e-6)}

_SGD = {"optimizer": "sgd", "schedule": "cosine", "learning_rate": 0.03, "weight_decay": 1e-4}
_LARS = {"optimizer": "lars", "schedule": "warm-up", "learning_rate": 0.3, "weight_decay": 1e-6}
#: The recipes of the papers; learning rates are for a batch of 256. Methods that are not here get the common recipe.
PAPERS: dict[str, dict[str, Any]] = {
    "moco-v1": {**_SGD, "schedule": "steps"},  # arXiv:1911.05722, section 3.3
    "moco-v2": _SGD,  # arXiv:2003.04297
    "end-to-end": _SGD,
    "memory-bank": _SGD,
    "moco-v3": {**_LARS, "weight_decay": 1.5e-6},  # arXiv:2104.02057, the authors' ResNet-50
    "simclr": _LARS,  # arXiv:2002.05709, section 2.2
    "byol": {**_LARS, "learning_rate": 0.2, "weight_decay": 1.5e-6},  # arXiv:2006.07733, section 3.3
    "simsiam": {**_SGD, "learning_rate": 0.05},  # arXiv:2011.10566, section 3
    "barlow-twins": {**_LARS, "learning_rate": 0.2},  # arXiv:2103.03230, section 2.2
    "vicreg": {**_LARS, "learning_rate": 0.2},  # arXiv:2105.04906, section 4.2
    "swav": _LARS,  # arXiv:2006.09882, appendix A: 4.8 at 4096
    "nnclr": _LARS,  # arXiv:2104.14548, section 4.1
    "dino": {"optimizer": "adamw", "schedule": "warm-up", "learning_rate": 5e-4, "weight_decay": 0.04},
}


def with_recipe(settings: Settings, preset: Preset) -> Settings:
    """Fill in optimiser, learning rate and weight decay, and each paper's where these are asked for.

    What the user gives goes before what a paper or preset has.

    Raises:
        SettingsError: an optimiser or recipe that does not exist.
    """
    for name, value, known in (("optimizer", settings.optimizer, OPTIMIZERS), ("recipe", settings.recipe, RECIPES)):
        if value is not None and value not in known:
            raise SettingsError(f"--{name} {value!r}: there are {', '.join(known)}")
    batch = settings.batch_size if settings.batch_size is not None else preset.batch_size
    optimizer = settings.optimizer or "adamw"
    rate, decay = _DEFAULTS.get(optimizer, (preset.learning_rate * 256 / batch, preset.weight_decay))
    recipes = dict(settings.method_recipes)
    if settings.recipe == "own":
        given = {name for name in OF_A_RUN if getattr(settings, name, None) is not None and name != "schedule"}
        for method in settings.methods:
            if "optimizer" in given or method not in PAPERS:
                continue
            own = {**PAPERS[method], "learning_rate": round(PAPERS[method]["learning_rate"] * batch / 256, 8)}
            kept = {name: value for name, value in own.items() if name not in given}
            recipes[method] = {**kept, **recipes.get(method, {})}
    return replace(
        settings,
        optimizer=optimizer,
        batch_size=batch,
        learning_rate=settings.learning_rate if settings.learning_rate is not None else rate * batch / 256,
        weight_decay=settings.weight_decay if settings.weight_decay is not None else decay,
        views=settings.views or ("own" if settings.recipe == "own" else None),
        method_recipes=recipes,
    )


def recipe_of(method: str, own: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """What a run has of its own, beside the common settings; ``own`` is what its line of an ablation or trial varies.

    With another batch the learning rate follows it, unless that is varied too: by its square root under AdamW, in proportion
    under SGD and LARS (Malladi et al. 2022, arXiv:2205.10287; Goyal et al. 2017, arXiv:1706.02677).
    """
    found = {**settings.method_recipes.get(method, {}), **own}
    if "batch_size" in own and "learning_rate" not in own:
        ratio = own["batch_size"] / (settings.batch_size or own["batch_size"])
        adamw = found.get("optimizer", settings.optimizer) in (None, "adamw")
        rate = found.get("learning_rate", settings.learning_rate) or 0.0
        found["learning_rate"] = float(f"{rate * (math.sqrt(ratio) if adamw else ratio):.4g}")
    return found
