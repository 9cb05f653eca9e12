"""lightly and Lightning, imported when needed; where one is missing, the error says how to get it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

INSTALL = 'pip install "moco-plugins[lightly]"'
#: Lightning goes by two names; a LightningModule of one is not accepted by the Trainer of the other.
LIGHTNING_NAMES = ("pytorch_lightning", "lightning.pytorch")


class MissingFrameworkError(ImportError):
    """lightly or Lightning is not installed; the message says how to get it."""


def lightly(module: str) -> Any:
    """Import a module of lightly, such as ``lightly("loss")``.

    Raises:
        MissingFrameworkError: lightly is not installed.
    """
    try:
        return importlib.import_module(f"lightly.{module}")
    except ModuleNotFoundError as error:
        raise MissingFrameworkError(f"lightly is needed for this ({error}): {INSTALL}") from error


def lightning_name(name: str | None = None) -> str:
    """Choose the Lightning to work with: ``pytorch_lightning`` or ``lightning.pytorch``.

    Args:
        name: "pytorch_lightning", "lightning" or "lightning.pytorch"; None: the one that is already imported. Where both
            are, it is ``lightning.pytorch``: lightly itself imports ``pytorch_lightning``, so only the other tells what
            the user works with. Where neither is, ``pytorch_lightning`` if it is installed.

    Raises:
        ValueError: another name.
        MissingFrameworkError: neither is installed.
    """
    if name is not None:
        chosen = "lightning.pytorch" if name == "lightning" else name
        if chosen not in LIGHTNING_NAMES:
            raise ValueError(f"lightning={name!r} must be 'pytorch_lightning' or 'lightning'")
        return chosen
    for loaded in reversed(LIGHTNING_NAMES):
        if sys.modules.get(loaded) is not None:
            return loaded
    for candidate in LIGHTNING_NAMES:
        if _installed(candidate.partition(".")[0]):
            return candidate
    raise MissingFrameworkError(f"Lightning is needed for this and is not installed: {INSTALL}")


def lightning(name: str | None = None) -> ModuleType:
    """Import Lightning under the name that :func:`lightning_name` chooses."""
    chosen = lightning_name(name)
    try:
        return importlib.import_module(chosen)
    except ModuleNotFoundError as error:
        raise MissingFrameworkError(f"{chosen} cannot be imported ({error}): {INSTALL}") from error


def _installed(package: str) -> bool:
    if package in sys.modules:  # None there keeps a package from being imported
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None
