"""MoCo (Momentum Contrast) for any PyTorch training framework.

    from moco_plugins import MoCo
    moco = MoCo(backbone, feature_dim=512)
    loss = moco(views)

A part, method, data set or framework is added by a plugin: a module with functions marked :data:`hookimpl`, named in
the entry-point group ``moco_plugins``. :mod:`moco_plugins.hookspecs` lists what can be plugged in.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core.infonce import info_nce
from .core.key_queue import KeyQueue
from .core.moco import MoCo
from .core.momentum import Cosine
from .hooks.activation import activate_loaded_frameworks
from .hooks.specs import hookimpl

if TYPE_CHECKING:
    from .core.cross import CrossMoCo
    from .core.views import TwoViews

__version__ = "0.1.0"
__all__ = ["Cosine", "CrossMoCo", "KeyQueue", "MoCo", "TwoViews", "hookimpl", "info_nce"]

# With MMEngine's custom_imports the framework is there first; where it comes later, it imports moco_plugins.registry.
activate_loaded_frameworks()


def __getattr__(name: str) -> Any:
    """Import what a step does not need when it is asked for, so that a training starts no later for it."""
    module = {"CrossMoCo": ".core.cross", "TwoViews": ".core.views"}.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(module, __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
