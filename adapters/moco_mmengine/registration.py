"""Child registries of scope ``moco_plugins``, one for each of MMEngine's root registries that we have types for.

A name is looked up when it is asked for: our own types are imported then, methods and data sets come from whatever
plugins are installed.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterable
from typing import Any

from mmengine import registry as roots
from mmengine.registry import Registry

from moco_plugins.hooks import manager as plugins

from .checkpoints import allow_message_hub
from .types import TYPES

SCOPE = "moco_plugins"


def register_types() -> None:
    """Create the child registries; doing it twice is doing it once."""
    for name in sorted({root for root, _ in TYPES.values()}):
        root = getattr(roots, name)
        if SCOPE not in root.children:
            _LazyRegistry(root.name, parent=root, scope=SCOPE).kind = name
    allow_message_hub()


class _LazyRegistry(Registry):
    """A registry that finds its types when they are asked for."""

    kind: str

    def get(self, key: str) -> Any:
        """Return the type, or one from the parent registry where the name is not ours."""
        name = key.removeprefix(f"{SCOPE}.")
        found = self._module_dict.get(name)
        if found is None:
            found = find_type(name, self.kind)
        if found is None and key == name:  # without a scope: somebody made us the default scope
            found = self._from_parents(name)
        if found is None and "." in name:
            return super().get(key)
        if found is None:
            raise KeyError(f"{SCOPE}.{name} is not known among {self.kind}. There are: {', '.join(self._names())}")
        return found

    def __contains__(self, key: str) -> bool:
        try:
            return self.get(key) is not None
        except KeyError:
            return False

    def _from_parents(self, name: str) -> Any:
        parent = self.parent
        while parent is not None:
            parent.import_from_location()
            if name in parent.module_dict:
                return parent.module_dict[name]
            parent = parent.parent
        return None

    def _names(self) -> list[str]:
        own = {name for name, (root, _) in TYPES.items() if root == self.kind}
        return sorted(own | set(_offered(self.kind)) | set(self._module_dict))


def find_type(name: str, kind: str | None = None) -> Any:
    """Return our type called ``name`` (in the registry ``kind``), or None."""
    if name in TYPES and kind in (None, TYPES[name][0]):
        module, attribute = TYPES[name][1].split(":")
        return getattr(importlib.import_module(f".{module}", __package__), attribute)
    if kind in (None, "MODELS"):
        match = _match(name, plugins.methods())
        if match:
            return _method_type(match)
    if kind in (None, "DATASETS"):
        match = _match(name, plugins.datasets())
        if match:
            from .data import ImageDataset

            return functools.partial(ImageDataset, match)
    return None


def _offered(kind: str) -> Iterable[str]:
    if kind == "MODELS":
        return plugins.methods()
    return plugins.datasets() if kind == "DATASETS" else ()


def _match(name: str, names: Iterable[str]) -> str | None:
    """MMEngine's types are written SimCLR or CIFAR10 where our names are simclr and cifar10."""
    return next((known for known in names if _plain(known) == _plain(name)), None)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@functools.cache
def _method_type(method: str) -> Any:
    from .models import method_type

    return method_type(method)
