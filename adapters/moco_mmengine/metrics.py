"""Evaluators for MMEngine's validation loop: weighted kNN and a linear probe on the frozen features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mmengine.evaluator import BaseMetric
from torch import Tensor

from moco_plugins.evaluation import knn_accuracy, linear_probe


class _FeatureMetric(BaseMetric):
    """Collect features; score those of the test part against those of the training part.

    Samples say which part they are from (``split``, see :class:`moco_mmengine.ImageDataset` with split="train+test"). Where
    none is from the training part, each half of the set is scored against the other.
    """

    def process(self, data_batch: Any, data_samples: Sequence[Any]) -> None:
        """Collect the predictions of a batch."""
        for sample in data_samples:
            if "features" not in sample:
                raise TypeError(
                    f"{type(self).__name__} got a prediction with {', '.join(sample)}, without 'features'; the model must be "
                    "one of moco_plugins (moco_plugins.MoCo)"
                )
            if sample["label"] < 0:
                raise ValueError(
                    f"{type(self).__name__}: an image has no label (gt_label); it needs one for every image"
                )
            self.results.append((sample["features"].float().cpu(), sample["label"], sample["split"] == "train"))

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the score."""
        features = torch.stack([row for row, _, _ in results])
        labels = torch.tensor([label for _, label, _ in results])
        bank = torch.tensor([in_bank for _, _, in_bank in results])
        if bank.all() or not bank.any():
            even = torch.arange(len(bank)) % 2 == 0
            halves = [self._score(features, labels, half) for half in (even, ~even)]
            return {name: (halves[0][name] + halves[1][name]) / 2 for name in halves[0]}
        return self._score(features, labels, bank)

    def _score(self, features: Tensor, labels: Tensor, bank: Tensor) -> dict[str, float]:
        raise NotImplementedError


class KNNMetric(_FeatureMetric):
    """Top-1 of weighted kNN on cosine similarity, from 0 to 1, as ``knn/top1``.

    Args:
        k: neighbours; 20.
        temperature: T of the weights exp(cosine / T); 0.1.
        collect_device, prefix, collect_dir: see MMEngine's BaseMetric.
    """

    default_prefix = "knn"

    def __init__(self, k: int = 20, temperature: float = 0.1, **base: Any) -> None:
        super().__init__(**base)
        self.k, self.temperature = k, temperature

    def _score(self, features: Tensor, labels: Tensor, bank: Tensor) -> dict[str, float]:
        top1 = knn_accuracy(features[bank], labels[bank], features[~bank], labels[~bank], self.k, self.temperature)
        return {"top1": top1}


class LinearProbeMetric(_FeatureMetric):
    """Top-1 of logistic regression on the frozen features, from 0 to 1, as ``linear/top1``.

    Args:
        options: of :func:`moco_plugins.evaluation.linear_probe`: strengths, fraction, seed, max_iter.
        collect_device, prefix, collect_dir: see MMEngine's BaseMetric.
    """

    default_prefix = "linear"

    def __init__(
        self,
        collect_device: str = "cpu",
        prefix: str | None = None,
        collect_dir: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(collect_device, prefix, collect_dir)
        self.options = options

    def _score(self, features: Tensor, labels: Tensor, bank: Tensor) -> dict[str, float]:
        with torch.random.fork_rng(devices=[]):
            top1, _ = linear_probe(features[bank], labels[bank], features[~bank], labels[~bank], **self.options)
        return {"top1": top1}
