"""Follows one run from the engine's callbacks: losses, curve, seconds; on disk after each epoch, so that it resumes."""

from __future__ import annotations

import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

from ... import evaluation
from ...data.images import labels_of
from ...data.seeding import key
from ...data.splits import cut
from ...files import write_atomically
from ..plan.data import Data
from ..plan.runs import RunPlan
from ..plan.settings import Settings
from ..results import plain
from .cost import PassCounter
from .progress import Progress
from .recipe import Normalise

#: Part of the training images whose labels are kept back to watch the training; test images are only used at the end.
VALIDATION = 0.125
#: At most how often a run is evaluated on the validation part, besides the last epoch.
CURVE_POINTS = 10


class NonFiniteLossError(ArithmeticError):
    """The loss is NaN or infinite: the run cannot go on."""


class Watch:
    """What is known of a run while it trains.

    Args:
        method, data, settings, run: the run.
        epochs: of the run.
        share: the part of the images that the run's epochs show; less than 1 where a budget ends them early.
        folder: where ``curve.json`` is kept.
        progress: told of steps and epochs.
        counter: counts encoder passes during the first step.
    """

    def __init__(
        self,
        method: Any,
        data: Data,
        settings: Settings,
        run: RunPlan,
        epochs: int,
        folder: Path,
        progress: Progress,
        counter: PassCounter | None,
        share: float = 1.0,
    ) -> None:
        self.method, self.data, self.settings, self.epochs, self.progress = method, data, settings, epochs, progress
        self.path, self.counter, self.share = folder / "curve.json", counter, share
        self.losses: list[float] = []
        self.curve: list[dict[str, float]] = []
        self.seconds = 0.0
        self.passes: tuple[int, ...] = (0, 0)  # images through the encoders in one step, forward and backward
        self.finish = Normalise(data.mean, data.std)
        labels = labels_of(data.train) if data.labelled else None
        self.bank, self.held = cut(data.train, labels, VALIDATION, key(run.seed, "validation"))
        if self.path.exists():
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            self.losses, self.curve, self.seconds = saved["losses"], saved["curve"], saved["seconds"]
            self.passes = tuple(saved["passes"])
        self._board = _tensorboard(folder / "tensorboard", len(self.losses)) if settings.tensorboard else None
        self._since: float | None = None
        self.label, self._said = f"{run.label}, seed {run.seed}", set[str]()

    def begin(self) -> None:
        """Start the clock, when the first batch is asked for: an engine's preparations are not training."""
        if self._since is None:
            self._since = time.perf_counter()

    def on_step(self, step: int, loss: float) -> None:
        """Record the loss of a step.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite.
        """
        if self.counter is not None:
            self.counter.stop()
            self.passes, self.counter = (self.counter.forward, self.counter.backward), None
        if not math.isfinite(loss):
            raise NonFiniteLossError(f"the loss is {loss} at step {step}; the last before it: {self.losses[-3:]}")
        del self.losses[step - 1 :]
        self.losses.append(loss)
        self.progress.step(step, loss)
        if self._board is not None:
            self._board.add_scalar("loss", loss, step)

    def on_epoch(self, epoch: int) -> None:
        """Evaluate now and then, save what is known."""
        self._count_seconds()
        shown = epoch if self.share == 1 else round(epoch * self.share, 3)
        self.curve = [point for point in self.curve if point["epoch"] < shown]
        if epoch == self.epochs or epoch % -(-self.epochs // CURVE_POINTS) == 0:
            values = self.look()
            self.curve.append({"epoch": shown, "seconds": round(self.seconds, 3), **values})
            self.progress.epoch(epoch, values)
            if self._board is not None:
                for name, value in values.items():
                    if name != "loss":  # each step has written its own
                        self._board.add_scalar(name, value, len(self.losses))
                self._board.flush()
        self._save()
        self._since = time.perf_counter()

    def on_checkpoint(self) -> None:
        """Save what is known, with the engine's checkpoint within an epoch."""
        self._count_seconds()
        self._save()

    def _count_seconds(self) -> None:
        now = time.perf_counter()
        self.seconds += 0.0 if self._since is None else now - self._since
        self._since = now

    def _save(self) -> None:
        state = {"losses": self.losses, "curve": self.curve, "seconds": self.seconds, "passes": self.passes}
        write_atomically(self.path, json.dumps(plain(state)))

    def look(self) -> dict[str, float]:
        """Evaluate on the validation part, and ask the method how it is."""
        values: dict[str, float] = {}
        if self.data.labelled:
            x, y = evaluation.extract_features(self.method, self.data.train, self.finish, self.data.image_size)
            bank, held = (rows[evaluation.labelled(y[rows])] for rows in (self.bank, self.held))
            k, temperature = self.settings.knn_k, self.settings.knn_temperature
            if y.ndim == 1:
                values["val_knn_top1"] = evaluation.knn_accuracy(x[bank], y[bank], x[held], y[held], k, temperature)
            elif bool(y[held].any()):
                knn = evaluation.knn_mean_average_precision
                values["val_knn_map"] = knn(x[bank], y[bank], x[held], y[held], k, temperature)
        per_epoch = max(1, len(self.data.pretrain) // (self.settings.batch_size or 1))
        recent = self.losses[-per_epoch:]
        values["loss"] = sum(recent) / max(1, len(recent))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            metrics = self.method.metrics()
        for message in (str(warning.message) for warning in caught):
            what = message.partition(":")[0]  # the numbers behind it change from look to look
            if what not in self._said:
                self.progress.say(f"{self.label}: {message}")
            self._said.add(what)
        values.update({f"metric_{name}": value for name, value in metrics.items() if name != "loss"})
        return values

    def close(self) -> None:
        """Let go of what is open."""
        if self.counter is not None:
            self.counter.stop()
        if self._board is not None:
            self._board.close()


def _tensorboard(folder: Path, step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)
