"""A comparison from start to end: baselines, runs, report; whatever is finished is kept, whatever is missing continues."""

from __future__ import annotations

import importlib.util
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import distributed
from .baselines import RAW, baselines
from .pictures import VIEWS, draw_views
from .progress import Progress
from .results import Results
from .run import build_seeded_backbone, build_views, carry_out
from .settings import Settings, complete, load_data, plan

_NEEDED = ("sklearn", "scipy", "matplotlib", "tqdm")
_VERSIONS = ("moco-plugins", "torch", "torchvision", "lightly", "pytorch-lightning", "mmengine", "timm", "scikit-learn")


class MissingExtraError(ImportError):
    """The packages of an extra are not installed."""


def need_bench_extra() -> None:
    """Make sure that what the harness needs is installed.

    Raises:
        MissingExtraError: it is not; with the pip command.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f'the harness needs {", ".join(missing)}: pip install "moco-plugins[bench]"')


def bench(settings: Settings, out: Path, progress: Progress, command: str = "") -> Results:
    """Carry out a comparison into the folder ``out`` and return its results.

    Raises:
        KeyboardInterrupt: stopped by the user; finished runs are in ``out``, and the same call continues.
        Others before anything runs: settings, names or data that do not work.
    """
    need_bench_extra()
    data = load_data(settings)
    settings = complete(settings, data)
    build_seeded_backbone(settings, data, 0)  # an unknown one, or one for larger images, is said before anything runs
    build_views(settings)
    results = Results(out, settings)
    runs = plan(settings)
    todo = [run for run in runs if results.find(run, settings.engine) is None]
    if distributed.rank() == 0:
        _describe(results, settings, data, command)
        if len(todo) < len(runs):
            progress.say(f"{len(runs) - len(todo)} of {len(runs)} runs are in {out} already; continuing with the rest")
        _baselines(results, settings, data)
        if not (out / "figures" / VIEWS).exists():
            draw_views(settings, data, out / "figures")
    for run in todo:
        record = carry_out(run, settings, data, out, progress)
        if distributed.rank() == 0:
            results.put(record)
    return results


def _baselines(results: Results, settings: Settings, data: Any) -> None:
    have = {(record["method"], record["seed"]) for record in results.content["baselines"]}
    for seed in range(settings.seeds):
        if ("untrained", seed) not in have:
            raw = not any(name == RAW for name, _ in have) and seed == 0
            results.content["baselines"] += baselines(settings, data, seed, raw)
            results.save()


def _describe(results: Results, settings: Settings, data: Any, command: str) -> None:
    content = results.content
    content["data"] = {
        "name": data.name,
        "train_images": len(data.train),
        "test_images": len(data.test),
        "channels": data.channels,
        "image_size": data.image_size,
        "classes": list(getattr(data.train, "classes", ())),
        "labelled": data.labelled,
        "mean": data.mean,
        "std": data.std,
    }
    commands = content.setdefault("commands", [])
    if command and command not in commands:
        commands.append(command)
    content["versions"] = {"python": platform.python_version(), **_versions()}
    content["hardware"] = _hardware()
    content["date"] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _hardware() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{torch.get_num_threads()} CPU threads, {platform.machine()}, {sys.platform}"
