"""Printing that never raises: what was computed for hours must not be lost because a terminal cannot show a letter."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class Unfailing:
    """A text stream that writes what it can: letters that its encoding lacks as "?", and nothing once nobody reads.

    Args:
        stream: such as ``sys.stdout``; all else is asked of it.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._gone = False

    def write(self, text: str) -> int:
        """Write text; return its length."""
        self._try(lambda: self._write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, if somebody reads."""
        self._try(self._stream.flush)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeError:
            encoding = getattr(self._stream, "encoding", None) or "ascii"
            self._stream.write(text.encode(encoding, "replace").decode(encoding))

    def _try(self, action: Any) -> None:
        if self._gone:
            return
        try:
            action()
        except (OSError, ValueError):  # the pipe is broken, the disk is full, the stream is closed
            self._gone = True
            with contextlib.suppress(Exception):  # what is left in the buffer would raise when the program ends
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def unfailing() -> Iterator[None]:
    """Within this context, what is written to stdout and stderr never raises."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream if stream is None else Unfailing(stream) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
