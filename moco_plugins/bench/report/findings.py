"""What the report says in words: what was compared, what came out, what to be careful about."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...sizes import written
from ..measures import by_precision
from ..measures import named as measured
from .comparison import cost_note, differences, engines_agree, join, named, seeds_of, unequal_budgets
from .table import Row, mean, number, rows, shortened

METRICS = {"knn_top1": "kNN accuracy", "linear_top1": "linear-probe accuracy"}
#: Under the table of costs.
COST_NOTE = (
    "Means over the seeds. Forward, backward: images that went through an encoder of the method, of all its encoders "
    "together; both are its encoder passes. Train s: training alone, evaluation apart. Peak: memory of the process, or "
    "of the GPU where one is used. Parameters: those that the optimiser trains."
)
_SHOWN = {
    "backbone": "backbone",
    "epochs": "epochs",
    "budget": "budget",
    "batch_size": "batch size",
    "learning_rate": "learning rate",
    "weight_decay": "weight decay",
    "optimizer": "optimiser",
    "views": "views",
    "image_size": "image size",
    "knn_k": "kNN: k",
    "knn_temperature": "kNN: temperature",
    "precision": "precision",
    "devices": "devices",
}


def judged_only(content: Mapping[str, Any]) -> bool:
    """Whether nothing was trained: weights from files were judged."""
    return content.get("kind") == "evaluate"


def _runs(content: Mapping[str, Any], metric: str = "knn_top1") -> list[Row]:
    return [row for row in rows(content, metric) if not row.baseline]


def title(content: Mapping[str, Any]) -> str:
    """What was compared, as a headline."""
    data = content.get("data", {}).get("name", "data")
    option = (content.get("ablation") or {}).get("option")
    methods = list(dict.fromkeys(run["method"] for run in content["runs"]))
    if option:
        return f"{option.replace('_', ' ').capitalize()} of {join(methods)} on {data}"
    labels = list(dict.fromkeys(run["label"] for run in content["runs"]))
    if len(labels) > 6:
        return f"{len(labels)} methods on {data}"
    return f"{join(labels) if labels else 'No runs'} on {data}"


def sentences(content: Mapping[str, Any], metric: str, reference: str | None) -> list[str]:
    """What came out."""
    said = []
    question = (content.get("ablation") or {}).get("question")
    if question:
        said.append(question)
    table = rows(content, metric)
    scored = [row for row in table if not row.baseline and row.values(metric)]
    if not any(row.seeds for row in table if not row.baseline):
        return [*said, "No run has been finished."]
    if not scored:
        return [*said, "Accuracy could not be measured; losses and the shape of the features stand below."]
    best = scored[0]
    base = {row.label: row.values(metric) for row in table if row.baseline}
    first = f"Best {measured(METRICS[metric], by_precision(content))}: {best.label}, {100 * mean(best.values(metric)):.1f} %."
    if base.get("untrained"):
        raw = f", raw pixels {100 * mean(base['raw-pixels']):.1f} %" if base.get("raw-pixels") else ""
        first += f" The same backbone untrained reaches {100 * mean(base['untrained']):.1f} %{raw}."
    said.append(first)
    timed = [row for row in scored if not math.isnan(row.seconds)]
    if len(timed) > 1 and not content.get("ablation"):
        fast, slow = min(timed, key=lambda row: row.seconds), max(timed, key=lambda row: row.seconds)
        if slow.seconds > 1.1 * fast.seconds:
            said.append(
                f"{fast.label} trains in {number(fast.seconds)} s, {slow.label} in {number(slow.seconds)} s "
                f"({slow.seconds / fast.seconds:.1f} times as long)."
            )
    return said


def verdicts(content: Mapping[str, Any], metric: str, reference: str | None) -> list[str]:
    """Whether the data can tell the methods apart, and whether the engines agree."""
    if judged_only(content):
        return _by_chance(content, metric)
    table = rows(content, metric)
    short = {row.label: less.label for row, less in zip(table, shortened(table), strict=True)}
    found = differences(table, metric, reference)
    renamed = (replace(one, label=short[one.label], reference=short[one.reference]) for one in found)
    return [*(one.sentence() for one in renamed), *engines_agree(content)]


def _by_chance(content: Mapping[str, Any], metric: str) -> list[str]:
    """How far apart two accuracies on the same test images must be to mean something."""
    found = [mean(row.values(metric)) for row in _runs(content, metric) if row.values(metric)]
    count = content.get("data", {}).get("test_images")
    if not found or not count or by_precision(content):
        return []
    half = 196 * math.sqrt(max(found) * (1 - max(found)) / count)
    return [f"With {count} test images an accuracy of {100 * max(found):.1f} % is known to ±{half:.1f} points (95 %)."]


def _below_baselines(content: Mapping[str, Any], metric: str) -> list[str]:
    table = [row for row in rows(content, metric) if row.values(metric)]
    scored = [row for row in table if not row.baseline]
    found = []
    for base in (row for row in table if row.baseline):
        bar = mean(base.values(metric))
        below = [row for row in scored if mean(row.values(metric)) < bar]
        if below:
            names = named(below, scored)
            who = "No method reaches" if len(below) == len(scored) else f"{join(names)} {_stay(names)} below"
            found.append(
                f"{who} the {measured(METRICS[metric], by_precision(content))} of {base.label} ({100 * bar:.1f} %)."
            )
    return found


def _stay(names: list[str]) -> str:
    return "stays" if len(names) == 1 else "stay"


def damaged(content: Mapping[str, Any]) -> list[str]:
    """Files that could not be read when they were met."""
    files = content.get("data", {}).get("damaged") or ()
    if not files:
        return []
    more = f" and {len(files) - 10} more" if len(files) > 10 else ""
    be = "image was" if len(files) == 1 else "images were"
    return [f"{len(files)} {be} damaged and left out when met: {', '.join(files[:10])}{more}."]


def warnings(content: Mapping[str, Any], metric: str = "knn_top1") -> list[str]:
    """What makes the numbers weaker than they look."""
    found = [*content.get("data", {}).get("notes", ()), *damaged(content)]
    runs = _runs(content)
    seeds = max((row.seeds for row in runs), default=0)
    if 0 < seeds < 3 and not judged_only(content):
        found.append(
            f"Only {seeds} seed{'s' * (seeds > 1)}, which cannot tell a difference from chance. Try --seeds 5."
        )
    for sentence in (unequal_budgets(content), cost_note(content)):
        if sentence:
            found.append(sentence)
    found += _gone_wrong(content["runs"])
    labelled = sorted({record["label"] for record in content["runs"] if record.get("labels_used")})
    if labelled:
        found.append(f"{join(labelled)} learned from the labels of the training images; the others have not seen them.")
    found += _below_baselines(content, metric)
    for name, values in content.get("differences", {}).items():
        found.append(
            f"The merged results differ in {name.replace('_', ' ')}: {join([str(value) for value in values])}."
        )
    return found


def _gone_wrong(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Failed and collapsed runs; the seeds of a method with which the same happened share a sentence."""
    failed: dict[tuple[str, str], list[int]] = {}
    flat: dict[str, list[tuple[int, float, float]]] = {}
    for record in runs:
        if record.get("status") == "failed":
            failed.setdefault((record["label"], str(record.get("error"))), []).append(record["seed"])
        metrics = record.get("metrics") or {}
        std, reference = metrics.get("feature_std"), metrics.get("feature_std_reference")
        if std is not None and reference and std < 0.1 * reference:
            flat.setdefault(record["label"], []).append((record["seed"], std, reference))
    found = [f"{label}, {seeds_of(seeds)}, failed: {error}" for (label, error), seeds in failed.items()]
    for label, spreads in flat.items():
        found.append(
            f"{label}, {seeds_of([seed for seed, _, _ in spreads])}: the method's head gives nearly the same for all images "
            f"(spread {max(std for _, std, _ in spreads):.2g}, {spreads[0][2]:.2g} where it is even): the training has "
            "collapsed, or has not come far."
        )
    return found


def table_note(content: Mapping[str, Any]) -> str:
    """How to read the table."""
    seeds = max((row.seeds for row in _runs(content)), default=0)
    spread = (
        "Mean ± standard deviation over the seeds; in brackets a 95 % bootstrap interval of the mean. Differences further "
        "down are taken seed by seed, with Student's interval, which few seeds make wide, and tested with Holm's correction. "
        if seeds > 1
        else ""
    )
    when = "" if judged_only(content) else " that were not looked at before the last epoch"
    return (
        f"{spread}{measured('Accuracy', by_precision(content))} on test images{when}; balanced: the mean of the classes' "
        "recalls, and AUROC the mean of their areas "
        f"under the ROC curve, both of the linear probe. Alignment: squared distance of an "
        "image's two views; uniformity: 0 where all images are one point, lower is more even; rank: directions in use."
    )


def how(content: Mapping[str, Any]) -> list[str]:
    """The experiment in two paragraphs."""
    data, shared = content.get("data", {}), content.get("settings", {})
    classes = data.get("classes") or []
    labels = f", {len(classes)} classes" if classes else ""
    more = data.get("pretraining_images", data.get("train_images"))
    learnt_from = data.get("learnt_from")
    if judged_only(content):
        return [
            f"{data.get('train_images')} training and {data.get('test_images')} test images of {data.get('name')}"
            f" ({data.get('channels')} channels{labels}). Nothing was trained but the probes: each file's backbone is frozen, "
            "at the image size and with the normalisation that its file tells, else those of the data and of ImageNet.",
            f"Judged by {_judging(shared)}",
            *(
                [
                    f"Fine-tuned: the whole network with a linear layer behind it, {shared['finetune']} epochs on all labels."
                ]
                if shared.get("finetune")
                else []
            ),
        ]
    extra = (
        f" Methods learn from the {more} images of {learnt_from}, and are judged on these."
        if learnt_from
        else f" Methods learn from {more} images, most of them without labels."
        if more != data.get("train_images")
        else ""
    )
    cut = " Each seed has its own split into training and test images." if data.get("cut_by_seed") else ""
    unlike = content.get("differences", {})
    views = "in its own views" if shared.get("views") == "own" else "in the same views"
    length = (
        f"until the budget ({shared['budget']}) is spent" if shared.get("budget") else "for the same number of epochs"
    )
    if unlike:
        length = f"within each of the folders that were merged here: they differ in {join(sorted(unlike))}"
    return [
        f"{data.get('train_images')} training and {data.get('test_images')} test images of {data.get('name')}"
        f" ({data.get('channels')} x {written(data.get('image_size') or 1)}{labels})."
        f"{extra}{cut} For each seed every method "
        f"starts from the same backbone weights and sees the same images in the same order, {views}, under "
        f"{_recipe(shared)}, {length}. Training uses no label.",
        f"Then the backbone is frozen and the last epoch is evaluated: {_judging(shared)}",
    ]


def _judging(shared: Mapping[str, Any]) -> str:
    return (
        f"weighted kNN (k = {shared.get('knn_k')}, T = {shared.get('knn_temperature')}) with the training images as bank, and "
        "linear probes on standardised features with all labels, a tenth and a hundredth of them; their regularisation is "
        "chosen on a part of the training images."
    )


def _recipe(shared: Mapping[str, Any]) -> str:
    if shared.get("recipe") == "own":
        return "its own paper's optimiser recipe (see below)"
    name = {"sgd": "SGD", "lars": "LARS"}.get(str(shared.get("optimizer")), "AdamW")
    tuned = f", with the {join(list(shared['tune']))} that it has picked" if shared.get("tune") else ""
    return f"the same optimiser recipe ({name}, one cycle of the learning rate){tuned}"


def settings(content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Names and values of the common settings."""
    shared = content.get("settings", {})
    engines = list(dict.fromkeys(run.get("engine", "") for run in content["runs"]))
    unlike = content.get("differences", {})
    values = {key: join([str(value) for value in unlike[key]]) if key in unlike else shared.get(key) for key in _SHOWN}
    shown = [(name, values[key]) for key, name in _SHOWN.items() if values[key] is not None]
    return shown if judged_only(content) else [("engine", join(engines) if engines else "–"), *shown]


def options(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The options of each label, in words."""
    found: dict[str, str] = {}
    for run in content["runs"]:
        text = ", ".join(
            f"{name} = {value}" for name, value in {**run.get("options", {}), **run.get("recipe", {})}.items()
        )
        found.setdefault(run["label"], text or "defaults")
    return list(found.items())
