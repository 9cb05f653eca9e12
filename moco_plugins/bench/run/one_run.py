"""One run: build everything from its seed, let the engine train, evaluate, and return the record."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...files import is_full, replacing
from ..plan.data import Data
from ..plan.runs import RunPlan
from ..plan.settings import Settings
from ..results import plain
from .cost import PassCounter, PeakMemory
from .lengths import length_of
from .pictures import draw_features
from .progress import Progress, Quiet
from .recipe import views_name
from .scores import evaluate
from .set_up import first_process, run_folder, set_up, show_data
from .watch import Watch

#: The trained backbone, in the folder of a run.
WEIGHTS = "backbone.pt"
#: In a record that is not in the results yet: files that are of no use once it is.
LEFT_OVER = "left_over"
#: Points of a loss curve that are kept in results.json; longer ones are averaged over neighbouring steps.
LOSS_POINTS = 2000


def carry_out(run: RunPlan, settings: Settings, data: Data, out: Path, progress: Progress) -> dict[str, Any]:
    """Train and evaluate one run; a failure is a record with status "failed", not an exception.

    Raises:
        OSError: the disk is full; what is on it continues once there is room.
        KeyboardInterrupt: the user stopped it; what is on disk continues.
    """
    if not first_process():
        progress = Quiet()
    folder = run_folder(out, run, settings)
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "method": run.method,
        "label": run.label,
        "engine": settings.engine,
        "seed": run.seed,
        "epochs": settings.epochs,
        "views": views_name(settings, run.method),
        "options": plain(run.options),
        "recipe": plain(run.recipe),
    }
    try:
        record.update(_train_and_evaluate(run, settings, data, folder, out, progress), status="finished")
    except Exception as error:
        if is_full(error):  # it would meet every other run, too
            raise
        (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        record.update(status="failed", error=f"{type(error).__name__}: {error}")
        if (folder / "curve.json").exists():
            record["curve"] = json.loads((folder / "curve.json").read_text(encoding="utf-8"))["curve"]
        progress.say(f"{run.label}, seed {run.seed}, failed: {record['error']} (see {folder / 'error.txt'})")
    finally:
        progress.end(record)
    return record


def _train_and_evaluate(
    run: RunPlan, settings: Settings, data: Data, folder: Path, out: Path, progress: Progress
) -> dict[str, Any]:
    built = set_up(run, settings, data, folder)
    loader, method, backbone = built.loader, built.method, built.backbone
    length = length_of(settings, built)
    epochs, whole = length.epochs, len(loader)
    loader.batch_sampler.limit = length.steps  # type: ignore[union-attr]
    show_data(method, data, run)
    counter = PassCounter(method, backbone)  # counts one step of the training
    watch = Watch(method, data, settings, run, epochs, folder, progress, counter, length.steps / whole)
    resumed = min(len(watch.losses), len(loader) * epochs)
    progress.start(f"{run.label} seed {run.seed}", len(loader) * epochs, resumed, settings.batch_size or 0)
    memory = PeakMemory(torch.device("cuda") if _on_gpu(settings) else None)
    try:
        loader.on_start = watch.begin
        told: dict[str, Any] = {
            "on_step": watch.on_step,
            "on_epoch": watch.on_epoch,
            "on_checkpoint": watch.on_checkpoint,
        }
        outcome = built.engine(replace(built.job, epochs=epochs, **told))
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
        "labels_used": "labels" in getattr(method, "asks_for", ()),
        "backbone_parameters": sum(p.numel() for p in backbone.parameters()),
        "resumed_at_step": resumed or None,
        "losses": thinned(watch.losses),
        "curve": watch.curve,
        "metrics": {**method.metrics(), **_whole_training(watch.curve)},
        **scores,
    }


def _keep_weights(backbone: nn.Module, run: RunPlan, settings: Settings, data: Data, path: Path) -> None:
    """Write what the comparison was about, for whoever wants to go on with it; ``torch.load`` reads it as it is."""
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
    with replacing(path) as partial:
        torch.save(content, partial)


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
