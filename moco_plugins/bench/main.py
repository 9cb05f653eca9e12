"""A comparison from start to end: baselines, runs, report; whatever is finished is kept, whatever is missing continues."""

from __future__ import annotations

import importlib.util
import platform
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..data.telling import telling
from ..hooks import manager as plugins
from .plan.ablations import ABLATIONS
from .plan.complete import complete
from .plan.data import Data
from .plan.errors import MissingExtraError, SettingsError
from .plan.learning import data_of
from .plan.runs import RunPlan, plan, queue_notes
from .plan.settings import Settings
from .results import Results
from .run.baselines import UNTRAINED, baselines
from .run.dictionaries import register_dictionaries
from .run.lengths import measure_lengths
from .run.one_run import LEFT_OVER, carry_out
from .run.pictures import draw_views
from .run.progress import Progress
from .run.recipe import build_loader, build_seeded_backbone
from .run.set_up import build_method, first_process
from .run.tune import tuned
from .run.weights import start_notes

_NEEDED = ("sklearn", "scipy", "matplotlib", "tqdm")
_VERSIONS = ("moco-plugins", "torch", "torchvision", "timm", "scikit-learn")


def need_bench_extra(*more: str) -> None:
    """Make sure that what the harness needs is installed, and ``more`` of the same extra.

    Raises:
        MissingExtraError: it is not; with the pip command.
    """
    missing = [name for name in (*_NEEDED, *more) if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f'the harness needs {", ".join(missing)}: pip install "moco-plugins[bench]"')


def bench(
    settings: Settings,
    out: Path,
    progress: Progress,
    command: str = "",
    metric: str | None = None,
    reference: str | None = None,
) -> Results:
    """Carry out a comparison into the folder ``out`` and return its results.

    Args:
        settings: what is compared.
        out: the folder; results that are there are continued.
        progress: told what happens.
        command: the command line, for the report.
        metric: what the user wants to sort by, if anything.
        reference: the label that the user wants others to be compared to, if any.

    Raises:
        KeyboardInterrupt: stopped by the user; finished runs are in ``out``, and the same call continues.
        Others before anything runs: settings, names or data that do not work.
    """
    need_bench_extra()
    register_dictionaries()
    with telling(progress.say):
        data = data_of(settings)
    if metric is not None and not data.labelled:
        raise SettingsError(f"--metric {metric}: {data.notes[0]} Leave out --metric")
    settings = complete(settings, data)
    data = with_notes(data, settings)
    with telling(progress.say):
        try_to_build(settings, data)
    results = Results(out, settings)
    if settings.tune:
        settings, results.content["tuning"] = tuned(
            settings, data, out, lambda run, trials, short, part: one(run, trials, short, part, progress)
        )
    runs = plan(settings)
    labels = dict.fromkeys([*(run.label for run in runs), *(record["label"] for record in results.runs)])
    if reference is not None and reference not in labels:
        raise SettingsError(f"--reference {reference!r}: there will be {', '.join(labels)}")
    todo = [run for run in runs if results.find(run, settings.engine) is None]
    if first_process():
        _prepare(results, settings, data, command, progress, f"{len(runs) - len(todo)} of {len(runs)}")
    measure_lengths(todo, settings, data, results.folder)
    for run in todo:
        one(run, results, settings, data, progress)
    return results


def with_notes(data: Data, settings: Settings) -> Data:
    """The data with what there is to say of the settings beside them: large queues, what is left out of first weights."""
    return replace(data, notes=(*data.notes, *queue_notes(settings, len(data.pretrain)), *start_notes(settings.init)))


def try_to_build(settings: Settings, data: Data) -> None:
    """Build everything once: a value that a part does not take is said now, not after an hour of other runs."""
    build_seeded_backbone(settings, data, 0)
    for run in plan(replace(settings, seeds=1)):
        try:
            own = run.settings(settings)
            build_method(run, own, data, build_loader(own, data, run.method, run.seed))
        except (LookupError, ImportError):  # a name or a package that is not there
            raise
        except (TypeError, ValueError) as error:
            raise SettingsError(f"{run.label}: {error}") from error
        except Exception:  # the fault of one method: it will be recorded with its run, and the others go on
            continue


def _prepare(results: Results, settings: Settings, data: Data, command: str, progress: Progress, finished: str) -> None:
    describe(results, settings, data, command)
    for note in data.notes:
        progress.say(note)
    if not finished.startswith("0 "):
        progress.say(f"{finished} runs are in {results.folder} already")
    _baselines(results, settings, data)
    draw_views(settings, data, results.folder / "figures")


def one(run: RunPlan, results: Results, settings: Settings, data: Data, progress: Progress) -> None:
    """Carry out a run and keep its record."""
    data = data.of_seed(run.seed)
    with telling(progress.say):
        record = carry_out(run, run.settings(settings), data, results.folder, progress)
    if first_process():
        about = results.content.setdefault("data", {})
        about["damaged"] = sorted({*about.get("damaged", ()), *data.damaged})
        left_over = record.pop(LEFT_OVER, ())
        results.put(record)
        for path in left_over:
            path.unlink(missing_ok=True)


def _baselines(results: Results, settings: Settings, data: Data) -> None:
    have = {record["seed"] for record in results.content["baselines"] if record["method"] == UNTRAINED}
    for seed in settings.seed_numbers:
        if seed not in have:
            raw = seed == settings.first_seed or data.cut_by_seed
            results.content["baselines"] += baselines(settings, data.of_seed(seed), seed, raw)
            results.save()


def describe(results: Results, settings: Settings, data: Data, command: str) -> None:
    """Write down what is about to be done, with what and on what."""
    content = results.content
    damaged = content.get("data", {}).get("damaged", ())
    content["data"] = described(data)
    content["data"]["damaged"] = sorted({*damaged, *data.damaged})
    if settings.ablation is not None:
        content["ablation"] = {"name": settings.ablation, "question": ABLATIONS[settings.ablation].question}
        content["ablation"]["option"] = ABLATIONS[settings.ablation].option
    elif settings.sweep:
        content["ablation"] = {"name": "sweep", "question": "", "option": next(iter(settings.sweep))}
    commands = content.setdefault("commands", [])
    if command and command not in commands:
        commands.append(command)
    content.update(about_the_machine())


def described(data: Data) -> dict[str, Any]:
    """What the reader of results must know of the data."""
    return {
        "name": data.name,
        "train_images": len(data.train),
        "test_images": len(data.test),
        "channels": data.channels,
        "image_size": data.image_size,
        "classes": data.classes,
        "pretraining_images": len(data.pretrain),
        "learnt_from": data.learnt_from,
        "labelled": data.labelled,
        "measure": data.measure,
        "cut_by_seed": data.cut_by_seed,
        "mean": data.mean,
        "std": data.std,
        "notes": data.notes,
        "damaged": data.damaged,
    }


def about_the_machine() -> dict[str, Any]:
    """Versions, hardware and date."""
    return {
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": _hardware(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def _versions() -> dict[str, str]:
    found = {}
    frameworks = [name for _, adapter in plugins.adapters().values() for name in adapter.distributions]
    for name in (*_VERSIONS, *frameworks):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _hardware() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' * (threads > 1)}, {platform.machine()}, {sys.platform}"
