"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

#: A disk with less than this is full: whoever could not write has left a few bytes.
_FULL = 2**20


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to; when the block is done, it takes the place of ``path`` in one step.

    Whoever reads ``path``, after a crash too, finds the old content or the new. Where the block raises, the old stays
    and nothing else is left.

    Raises:
        OSError: the disk is full, whatever the block's own error for that is.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException as error:
        left = shutil.disk_usage(path.parent).free if path.parent.exists() else _FULL
        partial.unlink(missing_ok=True)
        if left < _FULL and isinstance(error, RuntimeError):  # torch.save tells of it in words of its own
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error
        raise


def is_full(error: BaseException) -> bool:
    """Whether an error says that the disk, or what one may have of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file, in UTF-8, in one step.

    What is no Unicode, as in command lines with letters that the locale lacks, is written escaped.
    """
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
