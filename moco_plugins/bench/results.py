"""The results of a comparison on disk: results.json and results.csv, written after every run and never half."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..files import replacing, write_atomically
from .measures import by_precision
from .plan.errors import SettingsError
from .plan.runs import RunPlan
from .plan.settings import Settings

FILE = "results.json"
_COLUMNS = (
    "method",
    "label",
    "engine",
    "seed",
    "status",
    "epochs",
    "knn_top1",
    "linear_top1",
    "seconds",
    "images_per_second",
    "images_seen",
    "forward_images",
    "backward_images",
    "peak_memory_mib",
    "parameters",
)


def plain(value: Any) -> Any:
    """Turn a value into what JSON has: numbers stay, NaN becomes None, other objects their text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (str, int, bool)) or value is None else str(value)


class Results:
    """The content of results.json in a folder; opened, extended, saved.

    Args:
        folder: the folder; made where it does not exist.
        settings: what is about to run; None: only look.

    Raises:
        SettingsError: the folder holds results of other settings, or something else.
    """

    def __init__(self, folder: Path, settings: Settings | None = None) -> None:
        self.folder, self.path = folder, folder / FILE
        if folder.exists() and not folder.is_dir():
            raise SettingsError(f"{folder} is a file; give a folder")
        self.content: dict[str, Any] = {"settings": {}, "baselines": [], "runs": []}
        if self.path.exists():
            try:
                self.content = json.loads(self.path.read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                raise SettingsError(f"{self.path} is not readable as JSON ({error}); move it away") from error
            if settings is not None:
                self._must_agree(settings)
        elif settings is None:
            raise SettingsError(f"no {FILE} in {folder.resolve()}; give a folder that moco-plugins bench has written")
        if settings is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.content["settings"] = plain(settings.shared())

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The records of all runs."""
        return self.content["runs"]

    def _must_agree(self, settings: Settings) -> None:
        old, new = self.content.get("settings", {}), plain(settings.shared())
        usual = plain({**Settings().shared(), "optimizer": "adamw"})  # settings that older results have not had yet
        was = {name: old.get(name, usual[name]) for name in new}
        differ = [f"{name} was {was[name]!r}, now {new[name]!r}" for name in new if was[name] != new[name]]
        if old and differ:
            raise SettingsError(
                f"--out {self.folder} holds results of other settings ({'; '.join(differ)}). Give the same settings to "
                "continue there, or another --out"
            )

    def find(self, run: RunPlan, engine: str) -> dict[str, Any] | None:
        """The finished record of a run, if there is one.

        Raises:
            SettingsError: it is there with other options.
        """
        for record in self.runs:
            if (record["label"], record["seed"], record["engine"]) == (run.label, run.seed, engine):
                if record["status"] != "finished":
                    return None
                had, now = {**record["options"], **record.get("recipe", {})}, plain({**run.options, **run.recipe})
                if had != now:
                    raise SettingsError(
                        f"--out {self.folder} holds {run.label}, seed {run.seed}, with other options "
                        f"({had}, now {now}); give another --out"
                    )
                return record
        return None

    def put(self, record: Mapping[str, Any]) -> None:
        """Add a run's record in place of an earlier one of the same run, and save."""
        same = ("label", "seed", "engine")
        kept = [old for old in self.runs if any(old[name] != record[name] for name in same)]
        self.content["runs"] = [*kept, plain(record)]
        self.save()

    def save(self) -> None:
        """Write results.json and results.csv."""
        write_results(self.folder, self.content)


def write_results(folder: Path, content: Mapping[str, Any]) -> None:
    """Write results.json and results.csv, each in one step."""
    write_atomically(folder / FILE, json.dumps(content, indent=1))
    precision = by_precision(content)
    columns = [column.replace("top1", "map") if precision else column for column in _COLUMNS]
    lines: list[Sequence[Any]] = [columns]
    for record in (*content["baselines"], *content["runs"]):
        lines.append(tuple(record.get(column, "") for column in columns))
    with (
        replacing(folder / "results.csv") as partial,
        partial.open("w", newline="", encoding="utf-8") as file,
    ):
        csv.writer(file).writerows(lines)
