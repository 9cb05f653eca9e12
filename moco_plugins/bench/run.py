"""One run: build everything from its seed, let the engine train, evaluate, and return the record."""

from __future__ import annotations

import contextlib
import json
import math
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import plugins
from ..engine import TrainingJob
from .budget import Budget, Engine, Length, length_for
from .cost import PassCounter, PeakMemory
from .data import Data, SettingsError
from .loader import StepLoader, as_batch, key, random_state
from .pictures import draw_features
from .plan import RunPlan
from .progress import Progress, Quiet
from .recipe import Normalise, adamw, build_loader, build_seeded_backbone, one_cycle, views_name
from .results import plain, write_atomically
from .scores import evaluate
from .settings import Settings
from .watch import Watch

#: The trained backbone, in the folder of a run.
WEIGHTS = "backbone.pt"
#: How long a run is, where a budget has given its length; in its folder.
LENGTH = "length.json"
#: In a record that is not in the results yet: files that are of no use once it is.
LEFT_OVER = "left_over"
#: Points of a loss curve that are kept in results.json; longer ones are averaged over neighbouring steps.
LOSS_POINTS = 2000


def first_process() -> bool:
    """Whether this is the process that evaluates and writes; before there is a process group the environment tells."""
    return int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))) == 0


def carry_out(run: RunPlan, settings: Settings, data: Data, out: Path, progress: Progress) -> dict[str, Any]:
    """Train and evaluate one run; a failure is a record with status "failed", not an exception.

    Raises:
        KeyboardInterrupt: the user stopped it; what is on disk continues.
    """
    if not first_process():
        progress = Quiet()
    folder = _folder(out, run, settings)
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "method": run.method,
        "label": run.label,
        "engine": settings.engine,
        "seed": run.seed,
        "epochs": settings.epochs,
        "views": views_name(settings, run.method),
        "options": plain(run.options),
    }
    try:
        record.update(_train_and_evaluate(run, settings, data, folder, out, progress), status="finished")
    except Exception as error:
        (folder / "error.txt").write_text(traceback.format_exc())
        record.update(status="failed", error=f"{type(error).__name__}: {error}")
        if (folder / "curve.json").exists():
            record["curve"] = json.loads((folder / "curve.json").read_text())["curve"]
        progress.say(f"{run.label}, seed {run.seed}, failed: {record['error']} (see {folder / 'error.txt'})")
    finally:
        progress.end(record)
    return record


def build_method(run: RunPlan, settings: Settings, data: Data, loader: StepLoader) -> tuple[Any, nn.Module]:
    """The method of a run and its backbone, from the run's seed."""
    backbone, width = build_seeded_backbone(settings, data, run.seed)
    with random_state(key(run.seed, "method", run.method)):
        method: Any = plugins.method_factory(run.method)(backbone, width, **run.options)
        if hasattr(method, "set_dataset_size"):
            method.set_dataset_size(len(data.pretrain))
    loader.on_batch = getattr(method, "on_batch", None)
    return method, backbone


def _show(method: Any, data: Data, run: RunPlan) -> None:
    """Show the images to a method that wants to see them before the training, as a memory bank does."""
    if hasattr(method, "see_dataset"):
        finish = Normalise(data.mean, data.std)
        with random_state(key(run.seed, "see")):
            method.see_dataset(lambda rows: finish(as_batch(data.pretrain, rows, data.image_size)[0]))


def _job(run: RunPlan, settings: Settings, loader: StepLoader, method: Any, folder: Path) -> TrainingJob:
    """What the engine is asked to do, without a length and without anybody watching."""
    return TrainingJob(
        method=method,
        loader=loader,
        epochs=settings.epochs or 1,
        make_optimizer=adamw(settings),
        make_scheduler=one_cycle,
        folder=folder,
        device=settings.device,
        devices=settings.devices,
        num_nodes=settings.num_nodes,
        precision=settings.precision,
        seed=key(run.seed, "engine") % 2**31,
    )


def _length(settings: Settings, job: TrainingJob, engine: Engine, backbone: nn.Module) -> Length:
    """The length of a run; one that a budget gave is kept for a resume, since timing would not give it again."""
    if settings.budget is None:
        return Length(job.epochs, len(job.loader))  # type: ignore[arg-type]
    path = job.folder / LENGTH
    if not path.exists():
        write_atomically(path, json.dumps(asdict(length_for(Budget.parse(settings.budget), job, engine, backbone))))
    return Length(**json.loads(path.read_text()))


def measure_lengths(runs: Sequence[RunPlan], settings: Settings, data: Data, out: Path) -> None:
    """Find the lengths that a budget of passes or seconds gives, before an engine has started further processes.

    Raises:
        SettingsError: a launcher has started several processes, and each would measure another length.
    """
    todo = [(run, _folder(out, run, settings)) for run in runs]
    todo = [(run, folder) for run, folder in todo if not (folder / LENGTH).exists()]
    if settings.budget is None or not Budget.parse(settings.budget).per_method or not todo:
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingsError(
            f"--budget {settings.budget}: processes that a launcher has started would each measure another length; use "
            "--budget images=N, or let --devices start them"
        )
    engine = plugins.adapter(settings.engine).engine
    assert engine is not None  # checked with the settings
    for run, folder in todo:
        folder.mkdir(parents=True, exist_ok=True)
        of_seed = data.of_seed(run.seed)
        with contextlib.suppress(Exception):  # it will be met again in the run itself, and recorded
            loader = build_loader(settings, of_seed, run.method, run.seed)
            method, backbone = build_method(run, settings, of_seed, loader)
            _length(settings, _job(run, settings, loader, method, folder), engine, backbone)


def _folder(out: Path, run: RunPlan, settings: Settings) -> Path:
    return out / "runs" / f"{run.folder}-{settings.engine}"


def _train_and_evaluate(
    run: RunPlan, settings: Settings, data: Data, folder: Path, out: Path, progress: Progress
) -> dict[str, Any]:
    loader = build_loader(settings, data, run.method, run.seed)
    method, backbone = build_method(run, settings, data, loader)
    job, engine = _job(run, settings, loader, method, folder), plugins.adapter(settings.engine).engine
    assert engine is not None  # checked with the settings
    length = _length(settings, job, engine, backbone)
    epochs, whole = length.epochs, len(loader)
    loader.batch_sampler.limit = length.steps  # type: ignore[union-attr]
    _show(method, data, run)
    counter = PassCounter(method, backbone)  # counts one step of the training
    watch = Watch(method, data, settings, run, epochs, folder, progress, counter, length.steps / whole)
    resumed = min(len(watch.losses), len(loader) * epochs)
    progress.start(f"{run.label} seed {run.seed}", len(loader) * epochs, resumed)
    memory = PeakMemory(torch.device("cuda") if _on_gpu(settings) else None)
    try:
        loader.on_start = watch.begin
        outcome = engine(replace(job, epochs=epochs, on_step=watch.on_step, on_epoch=watch.on_epoch))
    finally:
        watch.close()
    peak = memory.mib()
    if not first_process():
        return {}
    images = outcome.steps * (settings.batch_size or 0)
    scores, features = evaluate(method, settings, data, run.seed, run.method)
    if run.seed == settings.first_seed:
        try:
            draw_features(*features, data, run.label, out / "figures")
        except Exception as error:  # a picture is not worth a run
            progress.say(f"{run.label}: its pictures could not be drawn: {type(error).__name__}: {error}")
    _keep_weights(getattr(method, "embedding_backbone", backbone), run, settings, data, folder / WEIGHTS)
    processes = settings.devices * settings.num_nodes
    return {
        LEFT_OVER: [*outcome.checkpoints, folder / "curve.json"],  # the record has the curve, the weights are kept
        "epochs": epochs if length.steps == whole else round(outcome.steps / whole, 2),
        "steps": outcome.steps,
        "images_seen": images,
        "forward_images": watch.passes[0] * processes * outcome.steps,
        "backward_images": watch.passes[1] * processes * outcome.steps,
        "seconds": watch.seconds,
        "images_per_second": images / watch.seconds if watch.seconds else None,
        "peak_memory_mib": peak,
        "parameters": sum(p.numel() for p in method.parameters() if p.requires_grad),
        "backbone_parameters": sum(p.numel() for p in backbone.parameters()),
        "resumed_at_step": resumed or None,
        "losses": thinned(watch.losses),
        "curve": watch.curve,
        "metrics": {**method.metrics(), **_whole_training(watch.curve)},
        **scores,
    }


def _keep_weights(backbone: nn.Module, run: RunPlan, settings: Settings, data: Data, path: Path) -> None:
    """Write what the comparison was about, for whoever wants to go on with it; ``torch.load`` reads it as it is."""
    partial = path.with_name(path.name + ".partial")
    content = {
        "state_dict": {name: value.cpu() for name, value in backbone.state_dict().items()},
        "backbone": settings.backbone,
        "channels": data.channels,
        "image_size": data.image_size,
        "mean": list(data.mean),
        "std": list(data.std),
        "method": run.label,
        "seed": run.seed,
    }
    torch.save(content, partial)
    os.replace(partial, path)


def _whole_training(curve: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What tells something over the training only: at its end the learning rate is zero, and no key drifts."""
    drifts = [point["metric_key_drift"] for point in curve if point.get("metric_key_drift") is not None]
    return {"key_drift": sum(drifts) / len(drifts)} if drifts else {}


def _on_gpu(settings: Settings) -> bool:
    return settings.device.startswith("cuda") or (settings.device == "auto" and torch.cuda.is_available())


def thinned(losses: list[float], most: int = LOSS_POINTS) -> list[list[float]]:
    """(step, mean loss since the last point), at most ``most`` points."""
    width = max(1, math.ceil(len(losses) / most))
    return [
        [start + len(part), round(sum(part) / len(part), 6)]
        for start in range(0, len(losses), width)
        for part in [losses[start : start + width]]
    ]
