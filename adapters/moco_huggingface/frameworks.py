"""transformers, accelerate and datasets, imported when needed; where one is missing or too old, the error says the cure."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from typing import Any

INSTALL = 'pip install "moco-plugins[huggingface]"'
#: The lowest versions that are supported, as in pyproject.toml.
LOWEST = {"transformers": (4, 50), "accelerate": (1, 3), "datasets": (3, 2)}


class MissingFrameworkError(ImportError):
    """A library of Hugging Face's is not installed, or too old; the message says how to get it."""


def huggingface(library: str, module: str = "") -> Any:
    """Import a library of :data:`LOWEST`, or a module of it, such as ``huggingface("transformers", "trainer_utils")``.

    Raises:
        MissingFrameworkError: it is not installed, or older than is supported.
    """
    try:
        found = metadata.version(library)
    except metadata.PackageNotFoundError as error:
        raise MissingFrameworkError(f"{library} is needed for this and is not installed: {INSTALL}") from error
    lowest = LOWEST[library]
    numbers = tuple(int(number) for number in re.findall(r"\d+", found)[: len(lowest)])
    if numbers < lowest:
        raise MissingFrameworkError(
            f"{library} {found} is too old, {'.'.join(map(str, lowest))} is the lowest that is supported: "
            f"pip install --upgrade {library}, or {INSTALL}"
        )
    try:
        return importlib.import_module(f"{library}.{module}" if module else library)
    except ModuleNotFoundError as error:
        raise MissingFrameworkError(f"{library} cannot be imported ({error}): {INSTALL}") from error
