"""Who is told how far something long has come: stderr, or whoever asks to be told."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)
#: Seconds before anything is said, and between two sayings.
_PATIENCE = 3.0


@contextlib.contextmanager
def telling(listener: Callable[[str], None]) -> Iterator[None]:
    """Within, ``listener`` is told instead of stderr."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Told:
    """Says now and then how many of something are done; nothing where it is quick."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self.what, self.total, self.said = what, total, time.monotonic()

    def __call__(self, done: int) -> None:
        """``done`` are done."""
        now = time.monotonic()
        if now - self.said >= _PATIENCE:
            self.said = now
            tell(f"{self.what}: {done}" + ("" if self.total is None else f" of {self.total}"))


def tell(text: str) -> None:
    """Say something to whoever listens."""
    listener = _listener.get()
    if listener is not None:
        listener(text)
    else:
        print(text, file=sys.stderr, flush=True)
