"""MoCo for MMEngine: ``custom_imports = dict(imports=['moco_plugins'])`` and ``model = dict(type='moco_plugins.MoCo', ...)``.

The same types can be imported, for lazy configs::

    with read_base():
        from .my_data import *
    from moco_mmengine import Backbone, MoCo

    model = dict(type=MoCo, backbone=dict(type=Backbone, name="resnet50"), variant="v2")

Importing this package does not import MMEngine; using one of its names does.
"""

from __future__ import annotations

from typing import Any

# First, for it activates this adapter where MMEngine is loaded: nothing of ours may be half imported then.
import moco_plugins  # noqa: F401

from .types import TYPES


def __getattr__(name: str) -> Any:
    """Find a type by name: those in :data:`TYPES`, and every self-supervised method there is."""
    if name.startswith("_"):
        raise AttributeError(name)
    from .plugin import activate

    try:
        activate()
        from .registration import find_type
    except ModuleNotFoundError as error:
        raise ImportError(f"moco_mmengine.{name}: {error}") from error
    found = find_type(name)
    if found is None:
        raise AttributeError(
            f"moco_mmengine has no type {name!r}; it has {', '.join(TYPES)} and every method by its name"
        )
    return found


def __dir__() -> list[str]:
    return sorted(TYPES)
