"""What all tests share: one thread, a seed, and two processes that stay alive to run distributed checks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# In the processes that tests start, too: there, threads that wait for each other waste the other core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).parent / "support"))

from ranks import Ranks


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    # What is kept of image folders; processes that tests start inherit it.
    os.environ["MOCO_PLUGINS_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Small tensors: more threads only wait for each other.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two processes with a gloo group; ``two_ranks.run(function, *args)`` runs a test module's function on both."""
    with Ranks(2) as ranks:
        yield ranks
