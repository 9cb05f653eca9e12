"""The plugin ``transformers``: Hugging Face's libraries. Imports none of them until one is used."""

from __future__ import annotations

from collections.abc import Sequence

from moco_plugins import hookimpl
from moco_plugins.hooks.engine import Adapter

from .frameworks import INSTALL


def _activate() -> None:
    """Nothing to register: what registers our model with ``AutoModel`` is importing it."""


@hookimpl
def moco_adapters() -> Sequence[Adapter]:
    """Accelerate."""
    return [Adapter(name="accelerate", framework="transformers", install=INSTALL, activate=_activate)]
