"""One run: build everything from its seed, let the engine train, evaluate, and return the record."""

from __future__ import annotations

import json
import math
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .. import plugins
from ..backbones import build_backbone
from ..datasets import stratified_split
from ..engine import TrainingJob
from . import evaluation
from .cost import PassCounter, PeakMemory
from .loader import StepLoader, key, make_loader, random_state
from .progress import Progress
from .results import plain, write_atomically
from .settings import Data, RunPlan, Settings

#: Part of the training images whose labels are kept back to watch the training; test images are never looked at before the end.
VALIDATION = 0.125
#: About how often a run is evaluated on the validation part.
CURVE_POINTS = 10
_BUILTIN_VIEWS = ("v1", "v2", "v2+", "v3")


class NonFiniteLossError(ArithmeticError):
    """The loss is NaN or infinite: the run cannot go on."""


class Normalise:
    """(x - mean) / std, per channel."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise (..., C, H, W)."""
        return (images - self.mean) / self.std


def build_views(settings: Settings) -> Any:
    """The two-view transform of a comparison. It does not normalise: the harness does, as in evaluation."""
    options = dict(settings.view_options)
    if settings.views in _BUILTIN_VIEWS:
        options.update(mean=(), std=())
    return plugins.build_views(str(settings.views), settings.image_size or 0, options)


def build_seeded_backbone(settings: Settings, data: Data, seed: int) -> tuple[nn.Module, int]:
    """The backbone of a seed: the same weights for every method."""
    with random_state(key(seed, "backbone")):
        return build_backbone(str(settings.backbone), data.channels, data.image_size, settings.pretrained)


def adamw(settings: Settings) -> Any:
    """The optimiser recipe, the same for every method: AdamW, no weight decay on biases and norms."""

    def make(method: nn.Module) -> Optimizer:
        trained = [p for p in method.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=settings.learning_rate or 0.0)

    return make


def one_cycle(optimizer: Optimizer, steps: int) -> LRScheduler:
    """The schedule, the same for every method: up from a 25th for 30 % of the steps, then down by a cosine."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=steps, cycle_momentum=False)


class Watch:
    """Follows one run from the engine's callbacks: losses, curve, seconds; on disk after each epoch, so that it resumes."""

    def __init__(
        self, method: Any, data: Data, settings: Settings, run: RunPlan, folder: Path, progress: Progress
    ) -> None:
        self.method, self.data, self.settings, self.run, self.progress = method, data, settings, run, progress
        self.path = folder / "curve.json"
        self.losses: list[float] = []
        self.curve: list[dict[str, float]] = []
        self.seconds = 0.0
        self.finish = Normalise(data.mean, data.std)
        labels = getattr(data.train, "labels", None)
        split = stratified_split(
            labels if data.labelled else None, len(data.train), VALIDATION, key(run.seed, "validation")
        )
        self.bank_rows, self.validation_rows = split
        self.counter: PassCounter | None = None
        self.passes: tuple[int, ...] = (0, 0)  # images through the encoders in one step, forward and backward
        if self.path.exists():
            saved = json.loads(self.path.read_text())
            self.losses, self.curve, self.seconds = saved["losses"], saved["curve"], saved["seconds"]
            self.passes = tuple(saved["passes"])
        self._since = time.perf_counter()

    def begin(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def on_step(self, step: int, loss: float) -> None:
        """Record the loss of a step."""
        if self.counter is not None:
            self.counter.stop()
            self.passes, self.counter = (self.counter.forward, self.counter.backward), None
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"the loss is {loss} at step {step}; the last before it: {self.losses[-3:]}")
        del self.losses[step - 1 :]
        self.losses.append(loss)
        self.progress.step(step, loss)

    def on_epoch(self, epoch: int) -> None:
        """Evaluate now and then, save what is known."""
        self.seconds += time.perf_counter() - self._since
        epochs = self.settings.epochs or epoch
        self.curve = [point for point in self.curve if point["epoch"] < epoch]
        if epoch == epochs or epoch % max(1, epochs // CURVE_POINTS) == 0:
            point = {"epoch": epoch, "seconds": round(self.seconds, 3), **self.look()}
            self.curve.append(point)
            self.progress.epoch(epoch, {k: v for k, v in point.items() if k not in ("epoch", "seconds")})
        state = {"losses": self.losses, "curve": self.curve, "seconds": self.seconds, "passes": self.passes}
        write_atomically(self.path, json.dumps(plain(state)))
        self._since = time.perf_counter()

    def look(self) -> dict[str, float]:
        """Evaluate on the validation part, and ask the method how it is."""
        values: dict[str, float] = {}
        if self.data.labelled:
            features, labels = evaluation.extract_features(
                self.method, self.data.train, self.finish, self.data.image_size
            )
            bank, held = self.bank_rows, self.validation_rows
            values["val_knn_top1"] = evaluation.knn_accuracy(
                features[bank],
                labels[bank],
                features[held],
                labels[held],
                self.settings.knn_k,
                self.settings.knn_temperature,
            )
        per_epoch = max(1, len(self.losses) // max(1, self._epochs_done()))
        values["loss"] = sum(self.losses[-per_epoch:]) / per_epoch
        values.update({f"metric_{k}": v for k, v in self.method.metrics().items() if k != "loss"})
        return values

    def _epochs_done(self) -> int:
        return max(1, round(len(self.losses) / max(1, len(self.data.train) // (self.settings.batch_size or 1))))


def carry_out(run: RunPlan, settings: Settings, data: Data, out: Path, progress: Progress) -> dict[str, Any]:
    """Train and evaluate one run; a failure is a record with status "failed", not an exception.

    Raises:
        KeyboardInterrupt: the user stopped it; what is on disk continues.
    """
    folder = out / "runs" / f"{run.folder}-{settings.engine}"
    folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "method": run.method,
        "label": run.label,
        "engine": settings.engine,
        "seed": run.seed,
        "epochs": settings.epochs,
        "options": plain(run.options),
    }
    try:
        record.update(_train_and_evaluate(run, settings, data, folder, progress), status="finished")
    except Exception as error:
        (folder / "error.txt").write_text(traceback.format_exc())
        record.update(status="failed", error=f"{type(error).__name__}: {error}")
        if (folder / "curve.json").exists():
            record["curve"] = json.loads((folder / "curve.json").read_text())["curve"]
        progress.say(f"{run.label}, seed {run.seed}, failed: {record['error']} (see {folder / 'error.txt'})")
    finally:
        progress.end(record)
    return record


def _train_and_evaluate(
    run: RunPlan, settings: Settings, data: Data, folder: Path, progress: Progress
) -> dict[str, Any]:
    backbone, width = build_seeded_backbone(settings, data, run.seed)
    with random_state(key(run.seed, "method", run.method)):
        method: Any = plugins.method_factory(run.method)(backbone, width, **run.options)
    watch = Watch(method, data, settings, run, folder, progress)
    loader = _loader(settings, data, run.seed, watch.finish)
    if hasattr(method, "on_batch"):
        loader.on_batch = method.on_batch
    watch.counter = PassCounter(method, backbone)
    engine = plugins.adapter(settings.engine).engine
    assert engine is not None  # checked with the settings
    steps = len(loader) * (settings.epochs or 0)
    label = f"{run.label} seed {run.seed}"
    progress.start(label, steps, min(len(watch.losses), steps))
    memory = PeakMemory(torch.device("cuda") if _on_gpu(settings) else None)
    watch.begin()
    done_before = len(watch.losses)
    outcome = engine(
        TrainingJob(
            method=method,
            loader=loader,
            epochs=settings.epochs or 0,
            make_optimizer=adamw(settings),
            make_scheduler=one_cycle,
            folder=folder,
            device=settings.device,
            devices=settings.devices,
            num_nodes=settings.num_nodes,
            precision=settings.precision,
            seed=key(run.seed, "engine") % 2**31,
            on_step=watch.on_step,
            on_epoch=watch.on_epoch,
        )
    )
    peak = memory.mib()
    images = outcome.steps * (settings.batch_size or 0)
    return {
        "images_seen": images,
        "forward_images": watch.passes[0] * outcome.steps,
        "backward_images": watch.passes[1] * outcome.steps,
        "seconds": watch.seconds,
        "images_per_second": images / watch.seconds if watch.seconds else None,
        "peak_memory_mib": peak,
        "parameters": sum(p.numel() for p in method.parameters() if p.requires_grad),
        "backbone_parameters": sum(p.numel() for p in backbone.parameters()),
        "resumed_at_step": done_before or None,
        "loss_first": watch.losses[0] if watch.losses else None,
        "loss_last": watch.losses[-1] if watch.losses else None,
        "losses": _thinned(watch.losses),
        "curve": watch.curve,
        "metrics": method.metrics(),
        **evaluate(method, settings, data, run.seed),
    }


def _on_gpu(settings: Settings) -> bool:
    return settings.device.startswith("cuda") or (settings.device == "auto" and torch.cuda.is_available())


def _loader(settings: Settings, data: Data, seed: int, finish: Normalise) -> StepLoader:
    return make_loader(
        data.train, build_views(settings), finish, settings.batch_size or 1, key(seed, "data"), settings.workers
    )


def _thinned(losses: list[float], most: int = 400) -> list[list[float]]:
    """(step, mean loss since the last point), at most ``most`` points."""
    width = max(1, math.ceil(len(losses) / most))
    return [
        [start + len(part), round(sum(part) / len(part), 6)]
        for start in range(0, len(losses), width)
        for part in [losses[start : start + width]]
    ]


def evaluate(method: nn.Module, settings: Settings, data: Data, seed: int) -> dict[str, Any]:
    """Evaluate a frozen backbone (or method) on the test images, with the training images as bank."""
    begin = time.perf_counter()
    finish = Normalise(data.mean, data.std)
    train = evaluation.extract_features(method, data.train, finish, data.image_size)
    test = evaluation.extract_features(method, data.test, finish, data.image_size)
    found = score(train, test, settings, data, seed)
    found["evaluation_seconds"] = time.perf_counter() - begin
    return found


def score(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], settings: Settings, data: Data, seed: int
) -> dict[str, Any]:
    """The accuracies of given features, and what the features look like."""
    found: dict[str, Any] = {
        "uniformity": evaluation.uniformity(test[0]),
        "effective_rank": evaluation.effective_rank(test[0]),
    }
    if data.labelled:
        found["knn_top1"] = evaluation.knn_accuracy(
            *train, *test, k=settings.knn_k, temperature=settings.knn_temperature
        )
        found["linear_top1"], found["linear_c"] = evaluation.linear_probe(
            *train, *test, seed=key(seed, "probe") % 2**31
        )
    return found
