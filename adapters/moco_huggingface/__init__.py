"""MoCo for Hugging Face: a ``PreTrainedModel`` for ``Trainer``, its collator and callbacks, and Accelerate as an engine.

    from moco_huggingface import MoCoForPreTraining, TwoViewCollator
    model = MoCoForPreTraining.around(ResNetConfig(), queue_size=4096)
    Trainer(model, args, TwoViewCollator(TwoViews("v2", 224)), images).train()

Importing this package imports nothing of Hugging Face; the names below do when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .callbacks import MoCoMetrics, OnlineKNN
    from .collator import TwoViewCollator
    from .configuration import MoCoConfig
    from .modeling import MoCoForPreTraining, MoCoOutput

_WHERE = {
    "MoCoConfig": "configuration",
    "MoCoForPreTraining": "modeling",
    "MoCoMetrics": "callbacks",
    "MoCoOutput": "modeling",
    "OnlineKNN": "callbacks",
    "TwoViewCollator": "collator",
}
__all__ = ["MoCoConfig", "MoCoForPreTraining", "MoCoMetrics", "MoCoOutput", "OnlineKNN", "TwoViewCollator"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
