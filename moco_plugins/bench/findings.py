"""What the report says in words: what was compared, what came out, what to be careful about."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .table import Row, mean, rows

_METRICS = {"knn_top1": "kNN accuracy", "linear_top1": "linear-probe accuracy"}
_SHOWN = {
    "backbone": "backbone",
    "epochs": "epochs",
    "batch_size": "batch size",
    "learning_rate": "learning rate",
    "weight_decay": "weight decay",
    "views": "views",
    "image_size": "image size",
    "knn_k": "kNN: k",
    "knn_temperature": "kNN: temperature",
    "precision": "precision",
    "devices": "devices",
}


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _runs(content: Mapping[str, Any], metric: str = "knn_top1") -> list[Row]:
    return [row for row in rows(content, metric) if not row.baseline]


def title(content: Mapping[str, Any]) -> str:
    """What was compared, as a headline."""
    labels = list(dict.fromkeys(run["label"] for run in content["runs"]))
    methods = list(dict.fromkeys(run["method"] for run in content["runs"]))
    what = _join(methods) if len(labels) == len(methods) else f"{_join(methods)}: {len(labels)} settings"
    return f"{what or 'No runs'} on {content.get('data', {}).get('name', 'data')}"


def sentences(content: Mapping[str, Any], metric: str) -> list[str]:
    """What came out."""
    attribute = {"knn_top1": "knn", "linear_top1": "linear"}[metric]
    scored = [row for row in _runs(content, metric) if getattr(row, attribute)]
    if not scored:
        return [
            "There are no labels, so accuracy cannot be measured; losses and the shape of the features stand below."
        ]
    best = scored[0]
    said = [f"Best {_METRICS[metric]}: {best.label}, {100 * mean(getattr(best, attribute)):.1f} %."]
    base = {row.label: getattr(row, attribute) for row in rows(content, metric) if row.baseline}
    if base.get("untrained"):
        raw = f", raw pixels {100 * mean(base['raw-pixels']):.1f} %" if base.get("raw-pixels") else ""
        said[0] += f" The same backbone untrained reaches {100 * mean(base['untrained']):.1f} %{raw}."
    if len(scored) > 1:
        timed = [row for row in scored if not math.isnan(row.seconds)]
        if len(timed) > 1:
            fast, slow = min(timed, key=lambda row: row.seconds), max(timed, key=lambda row: row.seconds)
            if slow.seconds > 1.1 * fast.seconds:
                said.append(
                    f"For the same number of images, {fast.label} trains {slow.seconds / fast.seconds:.1f} times faster than "
                    f"{slow.label} ({fast.seconds:.0f} s against {slow.seconds:.0f} s)."
                )
    return said


def warnings(content: Mapping[str, Any]) -> list[str]:
    """What makes the numbers weaker than they look."""
    found = []
    runs = _runs(content)
    if runs and max(row.seeds for row in runs) < 3:
        found.append(
            "Fewer than three seeds: differences of a point or less may be chance. Give --seeds 5 to know the spread."
        )
    for record in content["runs"]:
        if record.get("status") == "failed":
            found.append(f"{record['label']}, seed {record['seed']}, failed: {record.get('error')}")
        metrics = record.get("metrics") or {}
        std, reference = metrics.get("feature_std"), metrics.get("feature_std_reference")
        if std is not None and reference and std < 0.1 * reference:
            found.append(
                f"{record['label']}, seed {record['seed']}, has collapsed: all images have nearly the same features."
            )
    for difference in content.get("differences", []):
        found.append(f"The merged results differ in {difference}.")
    return found


def table_note(content: Mapping[str, Any]) -> str:
    """How to read the table."""
    seeds = max((row.seeds for row in _runs(content)), default=0)
    spread = "Mean ± standard deviation over the seeds. " if seeds > 1 else ""
    return (
        f"{spread}Accuracy on test images that were not looked at before the last epoch. Passes/image: encoder passes, "
        "forward and backward, for each image seen; train s: training alone, evaluation not counted."
    )


def how(content: Mapping[str, Any]) -> list[str]:
    """The experiment in two paragraphs."""
    data, settings_ = content.get("data", {}), content.get("settings", {})
    classes = data.get("classes") or []
    labels = f", {len(classes)} classes" if classes else ", no labels"
    return [
        f"{data.get('train_images')} training and {data.get('test_images')} test images of {data.get('name')}"
        f" ({data.get('channels')} x {data.get('image_size')} x {data.get('image_size')}{labels}). For each seed all methods "
        "start from the same backbone weights and see the same images in the same order, in the same views, under the same "
        "optimiser recipe (AdamW, one cycle of the learning rate) for the same number of epochs. Nothing of training uses a "
        "label.",
        f"Then the backbone is frozen and the last epoch is evaluated: weighted kNN (k = {settings_.get('knn_k')}, "
        f"T = {settings_.get('knn_temperature')}) with the training images as bank, and a linear probe on standardised "
        "features, whose regularisation is chosen on a part of the training images.",
    ]


def settings(content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names and values of the common settings."""
    shared = content.get("settings", {})
    engines = list(dict.fromkeys(run.get("engine", "") for run in content["runs"]))
    return [("engine", _join(engines) if engines else "–"), *((n, shared[k]) for k, n in _SHOWN.items() if k in shared)]


def options(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The options of each label, in words."""
    found: dict[str, str] = {}
    for run in content["runs"]:
        text = ", ".join(f"{name} = {value}" for name, value in run.get("options", {}).items())
        found.setdefault(run["label"], text or "defaults")
    return list(found.items())
