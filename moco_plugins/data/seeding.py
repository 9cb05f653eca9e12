"""Random numbers that depend on named things alone: not on how many an engine or an evaluation has drawn before."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import torch


def key(*parts: object) -> int:
    """A seed made of several things; unlike sums of seeds, different things give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


@contextlib.contextmanager
def random_state(seed: int) -> Iterator[None]:
    """Draw random numbers (torch, numpy, random) from ``seed``, then go on as if nothing had been drawn."""
    numpy = _numpy()
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy
