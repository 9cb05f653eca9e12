"""Processes with a gloo group that run functions of test modules, one job after the other.

Starting a process costs seconds, a job milliseconds. Answers travel in files, and workers end by ``os._exit``: gloo
workers that used DDP sometimes abort while the interpreter shuts down, after all work is done.
"""

from __future__ import annotations

import datetime
import importlib.util
import inspect
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any


class Ranks:
    """``world`` processes in one gloo group, started at the first job and again after a failure."""

    def __init__(self, world: int, **environment: str) -> None:
        self.world, self.environment = world, environment
        self._folder = Path(tempfile.mkdtemp(prefix="ranks"))
        self._workers: list[subprocess.Popen[str]] = []
        self._starts = self._jobs = 0

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 90) -> list[Any]:
        """Call a function of a test module, by name, on all ranks; return the results by rank."""
        import torch

        if not self._workers:
            self._start()
        self._jobs += 1
        job = self._folder / f"job{self._jobs}"
        torch.save((inspect.getfile(function), function.__qualname__, args), job)
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{job}\n")
            worker.stdin.flush()
        answers = [Path(f"{job}.{rank}") for rank in range(self.world)]
        deadline = time.monotonic() + timeout
        while not all(answer.exists() for answer in answers):
            if time.monotonic() > deadline or any(worker.poll() is not None for worker in self._workers):
                status = [worker.poll() for worker in self._workers]
                self.close()
                raise AssertionError(
                    f"{function.__qualname__} did not return on all ranks (exit status {status}):\n{self._logs(answers)}"
                )
            time.sleep(0.005)
        results = [torch.load(answer, weights_only=False) for answer in answers]
        failures = [f"rank {rank}:\n{text}" for rank, (_, text) in enumerate(results) if text]
        if failures:
            self.close()  # the other rank may be in the middle of a collective
            raise AssertionError("\n".join(failures))
        return [value for value, _ in results]

    def _start(self) -> None:
        self._starts += 1
        for rank in range(self.world):
            log = (self._folder / f"log{self._starts}.{rank}").open("w")
            store = self._folder / f"store{self._starts}"
            self._workers.append(
                subprocess.Popen(
                    [sys.executable, __file__, str(rank), str(self.world), str(store)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
                )
            )

    def _logs(self, answers: list[Path]) -> str:
        import torch

        texts = [str(torch.load(answer, weights_only=False)[1]) for answer in answers if answer.exists()]
        texts += [(self._folder / f"log{self._starts}.{rank}").read_text()[-3000:] for rank in range(self.world)]
        return "\n".join(texts)

    def close(self) -> None:
        """End the processes; the next job starts new ones."""
        for worker in self._workers:
            worker.kill()
            worker.wait()
            if worker.stdin is not None:
                worker.stdin.close()
        self._workers = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _module(path: str, loaded: dict[str, ModuleType]) -> ModuleType:
    if path not in loaded:
        spec = importlib.util.spec_from_file_location(f"job_{len(loaded)}_{Path(path).stem}", path)
        assert spec is not None
        assert spec.loader is not None
        loaded[path] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded[path])
    return loaded[path]


def _work(rank: int, world: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=40)
    )
    loaded: dict[str, ModuleType] = {}
    for line in sys.stdin:
        job = line.strip()
        value, failure = None, ""
        try:
            path, name, args = torch.load(job, weights_only=False)
            torch.manual_seed(0)
            value = getattr(_module(path, loaded), name)(*args)
        except BaseException:
            failure = traceback.format_exc()
        torch.save((value, failure), f"{job}.{rank}.part")
        os.replace(f"{job}.{rank}.part", f"{job}.{rank}")
    os._exit(0)


if __name__ == "__main__":
    _work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
