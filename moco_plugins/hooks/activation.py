"""Adapters of frameworks that are loaded already are activated by ``import moco_plugins``; no other plugin is touched."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from importlib import metadata

GROUP = "moco_plugins"


def entry_points() -> Iterator[metadata.EntryPoint]:
    """Every plugin that is installed, as ``importlib.metadata.entry_points(group=...)`` lists them, in less time.

    That function parses the entry points of all distributions; most have none of ours, which a look at the text tells,
    and this runs at every start of a training.
    """
    ours = {d.name: d for d in metadata.distributions() if GROUP in (d.read_text("entry_points.txt") or "")}
    for name, distribution in ours.items():
        first = next(
            iter(metadata.Distribution.discover(name=name)), distribution
        )  # of two of one name, Python imports it
        yield from (found for found in first.entry_points if found.group == GROUP)


def blocked() -> set[str]:
    """The plugins that the user keeps out by name."""
    return {name.strip() for name in os.environ.get("MOCO_PLUGINS_BLOCK", "").split(",") if name.strip()}


def activate_loaded_frameworks() -> None:
    """Activate the adapters whose framework is already imported; called by ``import moco_plugins``.

    Only entry points named after a loaded module are looked at, so that a plugin which imports ``moco_plugins`` itself
    is never loaded half-imported.
    """
    kept_out = blocked()
    for entry_point in entry_points():
        if entry_point.name in sys.modules and entry_point.name not in kept_out:
            activate(entry_point.name)


def activate(framework: str) -> None:
    """Activate the adapters of one framework (a module name); a broken adapter gives a warning, not an error."""
    for entry_point in entry_points():
        if entry_point.name != framework or framework in blocked():
            continue
        try:
            for offered in entry_point.load().moco_adapters():
                if offered.framework == framework:
                    offered.activate()
        except Exception as error:  # as for every plugin: the host must live
            warnings.warn(
                f"moco-plugins: the adapter for {framework} could not be activated: {type(error).__name__}: {error}",
                stacklevel=2,
            )
