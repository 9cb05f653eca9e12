"""The plugin ``lightly``: lightly's methods and Lightning's Trainer. Imports neither until one is used."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from moco_plugins import hookimpl
from moco_plugins.checkpoints import Format
from moco_plugins.hooks.engine import Adapter, TrainingJob, TrainingOutcome

from .baselines import BASELINES
from .formats import FORMATS

_METHODS = {
    "simclr": "SimCLR",
    "byol": "BYOL",
    "simsiam": "SimSiam",
    "barlow-twins": "BarlowTwins",
    "vicreg": "VICReg",
    "nnclr": "NNCLR",
    "swav": "SwAV",
    "dino": "DINO",
}


class MethodFactory:
    """Builds one of lightly's methods; lightly is imported at the first call, or when the signature is asked for."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, backbone: nn.Module, feature_dim: int, **options: Any) -> nn.Module:
        """Build the method around a backbone."""
        method: nn.Module = self._class()(backbone, feature_dim, **options)
        return method

    def _class(self) -> Any:
        return getattr(importlib.import_module("moco_lightly.methods"), self.kind)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._class())


@hookimpl
def moco_methods() -> Mapping[str, Callable[..., nn.Module]]:
    """lightly's methods, built of its own losses and heads."""
    return {name: MethodFactory(kind) for name, kind in _METHODS.items()}


def _train(job: TrainingJob) -> TrainingOutcome:
    from .engine import train

    return train(job)


@hookimpl
def moco_adapters() -> Sequence[Adapter]:
    """Lightning's Trainer."""
    install = 'pip install "moco-plugins[lightly]"'
    return [
        Adapter(
            name="lightning",
            framework="lightly",
            install=install,
            distributions=("lightly", "pytorch-lightning", "lightning"),
            engine=_train,
            baselines=BASELINES,
        )
    ]


@hookimpl
def moco_checkpoint_formats() -> Mapping[str, Format]:
    """lightly's and lightly-train's."""
    return FORMATS
