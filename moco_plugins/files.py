"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to; when the block is done, it takes the place of ``path`` in one step.

    Whoever reads ``path``, after a crash too, finds the old content or the new. Where the block raises, the old stays
    and nothing else is left.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
