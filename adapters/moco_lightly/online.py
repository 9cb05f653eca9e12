"""What a validation or test collects on its way, and what it comes to over all processes, each image once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from moco_plugins import MoCo
from moco_plugins.evaluation import knn_accuracy
from moco_plugins.steps import distributed

from . import batches
from .probes import FeatureMemory, OnlineLinearProbe


def own_rows(loader: Any) -> int | None:
    """How many rows of a loader are this rank's own; None: all.

    A DistributedSampler gives the first images once more, to the last ranks, where their number is no multiple of the
    ranks'.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return None
    return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]


def loss_and_features(moco: MoCo, views: list[Tensor], wanted: bool, **known: Any) -> tuple[Tensor, Tensor | None]:
    """Return the loss of two views and, where they are wanted, the features (N, D) of the first.

    The features are computed anyway: they are caught on their way to the head.
    """
    if not wanted:
        return moco(views, **known), None
    caught: list[Tensor] = []
    handle = moco.query_encoder.backbone.register_forward_hook(lambda *call: caught.append(call[2].detach()))
    try:
        loss: Tensor = moco(views, **known)
    finally:
        handle.remove()
    return loss, caught[0]


class Evaluation:
    """Loss, accuracy of the probe, and features for kNN, of one pass over the evaluation data.

    Args:
        feature_dim: D.
    """

    def __init__(self, feature_dim: int) -> None:
        self.bank, self.queries = FeatureMemory(feature_dim), FeatureMemory(feature_dim)
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self.bank.clear()
        self.queries.clear()
        self._seen: dict[int, int] = {}
        self._sums: dict[str, Tensor | float] = {"loss": 0.0, "images": 0.0, "right": 0.0, "labelled": 0.0}

    def take(self, moco: MoCo, probe: OnlineLinearProbe | None, batch: Any, index: int, loaders: Any) -> None:
        """Take a batch of the loader ``index``; the last one holds the images to classify, those before it the bank."""
        images, targets = batches.images(batch)
        targets = batches.labels(targets) if probe is not None else None
        each = list(loaders.values() if isinstance(loaders, Mapping) else loaders) if _several(loaders) else [loaders]
        n, is_bank = self._new_rows(each[index], index, len(images)), index < len(each) - 1
        views = None if is_bank else batches.pair_of(batch)
        features: Tensor | None = None
        if n and views is not None:
            loss, features = loss_and_features(moco, [view[:n] for view in views], targets is not None)
            self._add(loss=n * loss.double(), images=n)
        elif n and targets is not None:
            features = moco.embed(images[:n])
        if probe is None or targets is None or features is None:
            return
        features, targets = features.float(), targets[:n]
        (self.bank if is_bank else self.queries).add(features, targets)
        if not is_bank:  # no class is -1: images without a label are never right
            self._add(right=(probe(features).argmax(1) == targets).sum(), labelled=(targets >= 0).sum())

    def _new_rows(self, loader: Any, index: int, count: int) -> int:
        """How many of the next ``count`` rows of a loader are no padding."""
        own, seen = own_rows(loader), self._seen.get(index, 0)
        self._seen[index] = seen + count
        return count if own is None else max(0, min(count, own - seen))

    def _add(self, **sums: Tensor | float) -> None:
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value

    def results(
        self, recent: FeatureMemory | None, device: torch.device, k: int, temperature: float
    ) -> dict[str, float]:
        """Return loss, probe_top1 and knn_top1, as far as there is something to compute them from. All ranks must call it.

        Args:
            recent: the bank where there is no loader for one; None: there is no probe and no kNN, on no rank.
            device: where the ranks exchange what they have.
            k, temperature: see :func:`moco_plugins.evaluation.knn_accuracy`.
        """
        sums = torch.stack([torch.as_tensor(s, dtype=torch.float64, device="cpu") for s in self._sums.values()])
        if distributed.world_size() > 1:
            sums = torch.stack(distributed.gather_rows(sums[None].to(device))).sum((0, 1)).cpu()
        loss, images, right, labelled = sums.tolist()
        found = {"loss": loss / images} if images else {}
        if recent is None:
            return found
        if labelled:
            found["probe_top1"] = right / labelled
        queries = self.queries.collect(device)
        bank = self.bank.collect(device)
        if not len(bank[1]):  # on no rank: all know it
            bank = recent.collect(device)
        if len(bank[1]) and len(queries[1]):
            found["knn_top1"] = knn_accuracy(*bank, *queries, k=k, temperature=temperature)
        return found


def _several(loaders: Any) -> bool:
    return isinstance(loaders, (list, tuple, Mapping))
