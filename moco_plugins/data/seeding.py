"""Random numbers that depend on named things alone: not on how many an engine or an evaluation has drawn before."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


def key(*parts: object) -> int:
    """A seed made of several things; unlike sums of seeds, different things give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7], "big")


def seed_everything(seed: int) -> None:
    """Seed torch on all devices, Python and, where it is loaded, numpy."""
    torch.manual_seed(seed)
    _seed_host(seed)


def _seed_host(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


@contextlib.contextmanager
def random_state(seed: int) -> Iterator[None]:
    """Draw random numbers on the host (torch, numpy, random) from ``seed``, then go on as if nothing had been drawn."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        _seed_host(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)


def saved_random_state() -> dict[str, Any]:
    """The state of all generators as a checkpoint can hold it: tensors, numbers and strings, no pickled classes."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (str(kind), keys.tolist(), *rest)
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the state that :func:`saved_random_state` returned."""
    torch.set_rng_state(state["torch"].cpu())
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))
