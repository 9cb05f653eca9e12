"""What is shown while runs go on: a bar per run, nothing, or one line of JSON per event."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Protocol

from ..measures import score

KINDS = ("bar", "quiet", "json")


class Progress(Protocol):
    """Told what happens in a run."""

    def start(self, label: str, steps: int, done: int, images: int) -> None:
        """A run begins, or goes on, at step ``done`` of ``steps``, each of so many ``images``."""

    def step(self, step: int, loss: float) -> None:
        """A step was made."""

    def epoch(self, epoch: int, values: dict[str, float]) -> None:
        """An epoch is over and was evaluated."""

    def end(self, record: dict[str, Any]) -> None:
        """The run is over."""

    def say(self, text: str) -> None:
        """Something for the user to read."""


class Bars:
    """One bar per run, with loss, images a second, kNN and the time left."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._images = 0
        self._values: dict[str, str] = {}

    def start(self, label: str, steps: int, done: int, images: int) -> None:
        """Open the bar."""
        from tqdm import tqdm

        self._values, self._images = {}, images
        self._bar = tqdm(
            total=steps,
            initial=done,
            desc=f"{label:<22}",
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 30,  # in a file each line stays
            file=sys.stderr,
            bar_format="{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )

    def step(self, step: int, loss: float) -> None:
        """Move the bar."""
        self._values["loss"] = f"{loss:.3f}"
        rate = self._bar.format_dict["rate"]
        if rate:
            self._values["images/s"] = f"{rate * self._images:,.0f}".replace(",", "\u202f")
        self._bar.set_postfix(self._values, refresh=False)
        self._bar.update(step - self._bar.n)

    def epoch(self, epoch: int, values: dict[str, float]) -> None:
        """Show the accuracy."""
        knn = score(values, "val_knn_top1")
        if knn is not None:
            self._values["kNN" if "val_knn_top1" in values else "kNN mAP"] = f"{100 * knn:.1f}%"

    def end(self, record: dict[str, Any]) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def say(self, text: str) -> None:
        """Print above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)


class Quiet:
    """Nothing but warnings."""

    def start(self, label: str, steps: int, done: int, images: int) -> None:
        """Show nothing."""

    def step(self, step: int, loss: float) -> None:
        """Show nothing."""

    def epoch(self, epoch: int, values: dict[str, float]) -> None:
        """Show nothing."""

    def end(self, record: dict[str, Any]) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Print."""
        print(text, file=sys.stderr, flush=True)


class JsonLines:
    """One JSON object a line on standard error: start, step, epoch, end and message events; for clusters and dashboards."""

    #: Seconds between step events.
    EVERY = 30.0

    def __init__(self) -> None:
        self._label, self._loss, self._begin = "", 0.0, time.time()
        self._steps = self._images = self._at = 0
        self._told = self._begin

    def _emit(self, event: str, **values: Any) -> None:
        line = {"event": event, "run": self._label, "seconds": round(time.time() - self._begin, 1), **values}
        print(json.dumps(line), file=sys.stderr, flush=True)

    def start(self, label: str, steps: int, done: int, images: int) -> None:
        """Say that a run begins."""
        self._label, self._steps, self._images, self._at, self._told = label, steps, images, done, time.time()
        self._emit("start", steps=steps, done=done)

    def step(self, step: int, loss: float) -> None:
        """Remember the loss; a line for every step would be too much."""
        self._loss, passed = loss, time.time() - self._told
        if passed >= self.EVERY:
            speed = (step - self._at) / passed
            self._emit(
                "step",
                step=step,
                loss=loss,
                images_per_second=round(speed * self._images, 1),
                seconds_left=round((self._steps - step) / speed) if speed else None,
            )
            self._at, self._told = step, time.time()

    def epoch(self, epoch: int, values: dict[str, float]) -> None:
        """Say what the epoch brought."""
        self._emit("epoch", epoch=epoch, last_loss=self._loss, **values)

    def end(self, record: dict[str, Any]) -> None:
        """Say how the run ended."""
        kept = ("status", "knn_top1", "linear_top1", "knn_map", "linear_map", "images_per_second", "error")
        self._emit("end", **{name: record[name] for name in kept if name in record})

    def say(self, text: str) -> None:
        """Say it as an event."""
        self._emit("message", text=text)


def make_progress(kind: str) -> Progress:
    """Build the progress display: bar, quiet or json."""
    if kind not in KINDS:
        raise ValueError(f"progress={kind!r} is not one of {', '.join(KINDS)}")
    made: dict[str, type[Progress]] = {"bar": Bars, "quiet": Quiet, "json": JsonLines}
    return made[kind]()
