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
FEW = {"linear_top1_1pct": 0.01, "linear_top1_10pct": 0.1}
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
    """The accuracies of given features, and what the features look like."""
    found: dict[str, Any] = {
        "uniformity": evaluation.uniformity(test[0]),
        "effective_rank": evaluation.effective_rank(test[0]),
    }
    if not data.labelled:
        return found
    train, test = ((x[rows], y[rows]) for (x, y) in (train, test) for rows in [evaluation.labelled(y)])
    probe_seed = key(seed, "probe") % 2**31
    found["knn_top1"] = evaluation.knn_accuracy(*train, *test, settings.knn_k, settings.knn_temperature)
    probe = evaluation.probe(*train, *test, seed=probe_seed)
    found["linear_top1"], found["linear_c"] = probe.accuracy, probe.strength
    found.update(by_class(probe, data.classes))
    for name, fraction in FEW.items():
        found[name], _ = evaluation.linear_probe(*train, *test, fraction=fraction, seed=probe_seed)
    return found


def _alignment(model: nn.Module, settings: Settings, data: Data, method: str) -> float:
    views = ViewPairs(data.test, build_views(settings, method), Normalise(data.mean, data.std), key("alignment"))
    rows = torch.linspace(0, len(data.test) - 1, min(ALIGNED, len(data.test))).long().tolist()
    embed = getattr(model, "embed", model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    (first, second, *_), _, _ = views.__getitems__(Place(rows, 0, 0, 0))
    with evaluation.evaluating(model):
        return evaluation.alignment(embed(first.to(device)), embed(second.to(device)))
