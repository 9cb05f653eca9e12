"""Several results as one, without mixing what is not the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..measures import score
from ..plan.errors import SettingsError


def merged(contents: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Merge results; ``names`` tell them apart.

    A run that two results have under the same settings and options counts once. Runs of other settings or options that
    bear the same label get the name of their results behind it. Settings that differ are listed under "differences".

    Raises:
        SettingsError: the results are of different data, which makes their accuracies no comparison.
    """
    first = dict(contents[0])
    if len(contents) == 1:
        return first
    data = {name: content.get("data", {}).get("name") for name, content in zip(names, contents, strict=True)}
    if len(set(data.values())) > 1:
        listed = ", ".join(f"{name} of {value}" for name, value in data.items())
        raise SettingsError(f"results of different data cannot be compared ({listed}); make a report of each")
    runs: list[Mapping[str, Any]] = []
    baselines: list[Mapping[str, Any]] = []
    for content, name in zip(contents, names, strict=True):
        settings = content.get("settings", {})
        runs = _added(runs, [{**run, "settings": settings} for run in content["runs"]], _same_run, name)
        baselines = _added(baselines, content["baselines"], _same_scores, name)
    first["runs"] = [{key: value for key, value in run.items() if key != "settings"} for run in runs]
    first["baselines"] = baselines
    first["commands"] = list(dict.fromkeys(command for content in contents for command in content.get("commands", ())))
    first["differences"] = {}
    for name in sorted({name for content in contents for name in content["settings"]}):
        values = [
            value
            for content in contents  # those that were merged before bring what they differed in
            for value in content.get("differences", {}).get(name, [content["settings"].get(name)])
        ]
        unlike = [value for i, value in enumerate(values) if value not in values[:i]]
        if len(unlike) > 1:
            first["differences"][name] = unlike
    first["merged"] = list(names)
    return first


def _same_run(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(key) == other.get(key) for key in ("settings", "method", "options"))


def _same_scores(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one["seed"] != other["seed"] or all(
        score(one, key) == score(other, key) for key in ("knn_top1", "linear_top1", "uniformity")
    )


def _added(
    have: list[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], same: Any, name: str
) -> list[Mapping[str, Any]]:
    """The records of ``have``, and those of ``new`` that are not among them."""

    def line(record: Mapping[str, Any]) -> tuple[Any, Any]:
        return record["label"], record.get("engine")

    clash = {line(b) for a in have for b in new if line(a) == line(b) and not same(a, b)}
    renamed = [
        {**record, "label": f"{record['label']} ({name})"} if line(record) in clash else record for record in new
    ]
    seen = {(line(record), record["seed"]) for record in have}
    return [*have, *(record for record in renamed if (line(record), record["seed"]) not in seen)]
