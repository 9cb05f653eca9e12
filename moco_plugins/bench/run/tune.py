"""The same number of short trials for every method, judged on a part of the training images that they do not see."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...data.images import labels_of
from ...data.seeding import key
from ...data.splits import cut
from ...hooks import manager as plugins
from ..plan.ablations import Variation
from ..plan.budget import Budget
from ..plan.data import Data
from ..plan.errors import SettingsError
from ..plan.recipes import OF_A_RUN, recipe_of
from ..plan.runs import RunPlan, accepts, options_of
from ..plan.settings import Settings
from ..results import Results, plain

#: Part of the training images that trials are judged on, and the part of the training's length that a trial has.
HELD_OUT, LENGTH = 0.2, 1 / 3
#: Where trials are, in the folder of the results.
FOLDER = "tune"
One = Callable[[RunPlan, Results, Settings, Data], None]


def tuned(settings: Settings, data: Data, out: Path, one: One) -> tuple[Settings, dict[str, Any]]:
    """Carry out the trials that are missing; return the settings with the picks, and what is to be said of them.

    A method without one of the options tries its own points with further seeds, so that all have the same number of trials;
    the pick is the best mean kNN accuracy. Test images are not looked at.

    Args:
        settings: complete; ``tune`` is name -> values, each an option of methods or one of learning_rate, weight_decay,
            batch_size and optimizer.
        data: the data.
        out: the folder of the comparison.
        one: carries out a run and puts its record into the results.

    Raises:
        SettingsError: data without labels, or a name that no method has.
    """
    trials = plan_trials(settings)
    part = held_out(data)
    short = shortened(settings)
    results = Results(out / FOLDER, short)
    records = []
    for method, runs in trials.items():
        for run, values in runs:
            if results.find(run, settings.engine) is None:
                one(run, results, short, part)
            found = next((r for r in results.runs if (r["label"], r["seed"]) == (run.label, run.seed)), {})
            score = found.get(f"knn_{data.measure}")
            status = found.get("status", "failed")
            records.append({"method": method, "seed": run.seed, "values": values, "knn_top1": score, "status": status})
    picks = {method: pick([r for r in records if r["method"] == method]) for method in trials}
    told = {"trials": records, "picks": picks, "length": LENGTH, "images": len(part.test)}
    return with_picks(settings, picks), plain(told)


def plan_trials(settings: Settings) -> dict[str, list[tuple[RunPlan, dict[str, Any]]]]:
    """Method -> (trial, the values that it tries); as many for each method as the whole grid has points."""
    for name in settings.tune:
        if name not in OF_A_RUN and not any(accepts(method, name) for method in settings.methods):
            raise SettingsError(f"--tune {name}: none of {', '.join(settings.methods)} has such an option")
    count = len(list(itertools.product(*settings.tune.values())))
    found = {}
    for method in settings.methods:
        plugins.method_factory(method)
        own = {name: values for name, values in settings.tune.items() if name in OF_A_RUN or accepts(method, name)}
        points = [dict(zip(own, values, strict=True)) for values in itertools.product(*own.values())]
        found[method] = [
            (
                _trial(method, points[i % len(points)], settings.first_seed + i // len(points), settings),
                points[i % len(points)],
            )
            for i in range(count)
        ]
    return found


def _trial(method: str, values: Mapping[str, Any], seed: int, settings: Settings) -> RunPlan:
    recipe = {name: value for name, value in values.items() if name in OF_A_RUN}
    options = {name: value for name, value in values.items() if name not in OF_A_RUN}
    said = ", ".join(f"{name}={value}" for name, value in values.items())
    label = f"{method} {said}".strip()
    line = Variation(label, method, options, recipe)
    return RunPlan(method, label, seed, options_of(line, settings), recipe_of(method, recipe, settings))


def held_out(data: Data) -> Data:
    """The data of the trials: a part of the training images in place of the test images.

    Raises:
        SettingsError: accuracy cannot be measured, or the set cannot be cut.
    """
    if not data.labelled or not hasattr(data.train, "subset"):
        raise SettingsError(
            f"--tune needs labels to judge trials by, and a set that can be cut; {data.name} has not got that"
        )
    labels = labels_of(data.train)
    kept, held = cut(data.train, labels, HELD_OUT, key(0, "tune"))
    return replace(data, train=data.train.subset(kept), test=data.train.subset(held))


def shortened(settings: Settings) -> Settings:
    """The settings of a trial: a third of the length, one seed, nothing drawn."""
    if settings.budget is not None:
        budget = Budget.parse(settings.budget)
        return replace(settings, budget=f"{budget.kind}={budget.amount * LENGTH:g}", finetune=0, tune={})
    return replace(settings, epochs=max(1, round((settings.epochs or 1) * LENGTH)), finetune=0, tune={})


def pick(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The values with the best mean accuracy; the first of equals. Those of failed trials count as nothing."""
    points: list[dict[str, Any]] = []
    for record in records:
        if record["values"] not in points:
            points.append(record["values"])

    def score(values: dict[str, Any]) -> float:
        found = [record["knn_top1"] or 0.0 for record in records if record["values"] == values]
        return sum(found) / len(found)

    return max(points, key=score)


def with_picks(settings: Settings, picks: Mapping[str, Mapping[str, Any]]) -> Settings:
    """The settings with the values that each method has picked."""
    recipes, options = dict(settings.method_recipes), dict(settings.method_options)
    for method, values in picks.items():
        own = {name: value for name, value in values.items() if name in OF_A_RUN}
        recipes[method] = {**recipes.get(method, {}), **(recipe_of(method, own, settings) if own else {})}
        options[method] = {**options.get(method, {}), **{n: v for n, v in values.items() if n not in OF_A_RUN}}
    return replace(settings, method_recipes=recipes, method_options=options)
