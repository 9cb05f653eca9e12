"""All that is measured of a frozen backbone after the last epoch."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from ... import evaluation
from ...data.loader import Place, ViewPairs
from ...data.seeding import key
from ..plan.data import Data
from ..plan.settings import Settings
from .by_class import by_class
from .recipe import Normalise, build_views

#: Fractions of the labels that further linear probes get.
FEW = {"1pct": 0.01, "10pct": 0.1}
#: Test images whose two views tell the alignment.
ALIGNED = 500
Features = tuple[Tensor, Tensor]


def evaluate(
    model: nn.Module, settings: Settings, data: Data, seed: int, method: str
) -> tuple[dict[str, Any], tuple[Features, Features]]:
    """Evaluate a method or backbone; return the scores, and the (features, labels) of training and test images.

    ``method`` is the name whose views tell the alignment.
    """
    begin = time.perf_counter()
    finish = Normalise(data.mean, data.std)
    train = evaluation.extract_features(model, data.train, finish, data.image_size)
    test = evaluation.extract_features(model, data.test, finish, data.image_size)
    found = score(train, test, settings, data, seed)
    found["alignment"] = _alignment(model, settings, data, method)
    found["evaluation_seconds"] = time.perf_counter() - begin
    return found, (train, test)


def score(train: Features, test: Features, settings: Settings, data: Data, seed: int) -> dict[str, Any]:
    """The accuracies of given features, or mean average precisions (``map`` in their names), and how the features lie."""
    found: dict[str, Any] = {
        "uniformity": evaluation.uniformity(test[0]),
        "effective_rank": evaluation.effective_rank(test[0]),
    }
    if not data.labelled:
        return found
    rows = [evaluation.labelled(labels) for _, labels in (train, test)]
    train, test = ((x[own], y[own]) for (x, y), own in zip((train, test), rows, strict=True))
    groups = getattr(data.train, "groups", None)
    held: dict[str, Any] = {"seed": key(seed, "probe") % 2**31, "groups": None if groups is None else groups[rows[0]]}
    kind = data.measure
    knn = evaluation.knn_mean_average_precision if kind == "map" else evaluation.knn_accuracy
    found[f"knn_{kind}"] = knn(*train, *test, settings.knn_k, settings.knn_temperature)
    probe = evaluation.probe(*train, *test, **held)
    found[f"linear_{kind}"], found["linear_c"] = probe.score, probe.strength
    found.update(by_class(probe, data.classes))
    for name, fraction in FEW.items():
        found[f"linear_{kind}_{name}"], _ = evaluation.linear_probe(*train, *test, fraction=fraction, **held)
    return found


def _alignment(model: nn.Module, settings: Settings, data: Data, method: str) -> float:
    views = ViewPairs(data.test, build_views(settings, method), Normalise(data.mean, data.std), key("alignment"))
    rows = torch.linspace(0, len(data.test) - 1, min(ALIGNED, len(data.test))).long().tolist()
    embed = getattr(model, "embed", model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    (first, second, *_), _, _ = views.__getitems__(Place(rows, 0, 0, 0))
    with evaluation.evaluating(model):
        return evaluation.alignment(embed(first.to(device)), embed(second.to(device)))
