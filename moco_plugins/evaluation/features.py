"""The features of a frozen backbone.

Everything here reads: weights, BatchNorm statistics, training mode and the random state are the same afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..data.images import as_batch
from ..sizes import Size


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every part of ``model`` in eval mode, then each back into the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def extract_features(
    method: nn.Module,
    images: Any,
    finish: Callable[[Tensor], Tensor] = lambda batch: batch,
    image_size: Size | None = None,
    batch_size: int = 500,
) -> tuple[Tensor, Tensor]:
    """Return the features (N, D), float32 on the CPU, of all images and their labels (N,), -1 where there is none.

    Args:
        method: a :class:`moco_plugins.hooks.method.Method` (its ``embed`` is used), or a backbone.
        images: a map-style data set of (image, label).
        finish: applied to each batch (N, C, H, W) with values from 0 to 1: normalisation as a rule.
        image_size: scale and cut the images to this size; None: as they are.
        batch_size: images in one forward pass.
    """
    embed = getattr(method, "embed", method)
    device = next((p.device for p in method.parameters()), torch.device("cpu"))
    features, labels = [], []
    with evaluating(method):
        for start in range(0, len(images), batch_size):
            batch, numbers = as_batch(images, range(start, min(start + batch_size, len(images))), image_size)
            features.append(embed(finish(batch).to(device)).float().cpu())
            labels.append(numbers)
    return torch.cat(features), torch.cat(labels)
