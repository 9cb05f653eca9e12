"""How good a backbone is as a start: the whole network trained further on labelled images."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.images import as_batch, labels_of
from ..data.seeding import key, random_state
from ..sizes import Size
from .checks import class_numbers, labelled
from .features import evaluating
from .probe import Probe


def finetune(
    backbone: nn.Module,
    feature_dim: int,
    train: Any,
    test: Any,
    finish: Callable[[Tensor], Tensor] = lambda batch: batch,
    image_size: Size | None = None,
    epochs: int = 10,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    weight_decay: float = 1e-4,
    seed: int = 0,
) -> Probe:
    """Train a copy of the backbone with a linear layer behind it; return what it says of the test images.

    AdamW with a one-cycle schedule, cross-entropy (of several labels an image, binary for each class), images as in
    evaluation: no augmentation, so that what is compared is the start and nothing else. The last
    epoch counts. The backbone that is given stays as it is.

    Args:
        backbone: images -> (N, feature_dim).
        feature_dim: width of its features.
        train, test: map-style data sets of (image, label), or (image, (classes,) of 0 and 1); images of ``train`` without
            label (-1) take no part.
        finish: applied to each batch (N, C, H, W) with values from 0 to 1: normalisation as a rule.
        image_size: scale and cut the images to this size; None: as they are.
        epochs, batch_size, learning_rate, weight_decay: of the training.
        seed: decides the layer's start and the order of the images.

    Raises:
        ValueError: fewer than two classes.
    """
    labels = labels_of(train)
    rows, several = labelled(labels), labels.ndim == 2
    classes = torch.arange(labels.shape[1]) if several else torch.unique(labels[rows])
    if len(classes) < 2 and not several:
        raise ValueError(f"train has {len(classes)} class among its labels; fine-tuning needs two")
    device = next((p.device for p in backbone.parameters()), torch.device("cpu"))
    with random_state(key(seed, "finetune")):
        model = nn.Sequential(copy.deepcopy(backbone), nn.Linear(feature_dim, len(classes))).to(device)
        model.requires_grad_(True).train()
        batches = max(1, len(rows) // batch_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=weight_decay)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=epochs * batches)
        with torch.enable_grad():
            for _ in range(epochs):
                order = rows[torch.randperm(len(rows))]
                for part in order[: batches * batch_size].tensor_split(batches):
                    images, numbers = _known(*as_batch(train, part.tolist(), image_size))
                    optimizer.zero_grad()
                    logits = model(finish(images).to(device))
                    if several:
                        target = numbers.to(device, logits.dtype)
                        loss = F.binary_cross_entropy_with_logits(logits, target, reduction="sum") / max(1, len(target))
                    else:
                        loss = F.cross_entropy(logits, class_numbers(numbers, classes).to(device))
                    loss.backward()
                    optimizer.step()
                    schedule.step()
    told, truth = [], []
    with evaluating(model):
        for images, numbers in (_known(*batch) for batch in _all(test, image_size)):
            told.append(model(finish(images).to(device)).float().cpu())
            truth.append(numbers)
    found = torch.cat(truth)
    return Probe(torch.cat(told), found if several else class_numbers(found, classes), classes, learning_rate)


def _known(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Those that have a label: files may turn out to be damaged when they are met."""
    rows = labelled(labels)
    return images[rows], labels[rows]


def _all(images: Any, image_size: Size | None, batch_size: int = 500) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, len(images), batch_size):
        yield as_batch(images, range(start, min(start + batch_size, len(images))), image_size)
