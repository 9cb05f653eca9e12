"""The hooks, one function each; how to write a plugin is told in :mod:`moco_plugins.hooks.specs`, where they live."""

from .hooks.specs import *  # noqa: F403
from .hooks.specs import PROJECT, hookimpl, hookspec

__all__ = ["PROJECT", "hookimpl", "hookspec"]
