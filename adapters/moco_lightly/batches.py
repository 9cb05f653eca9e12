"""Read the batches that reach a LightningModule: lightly's collate, plain pairs, and what to do about all else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

_CURE = (
    "It must be (views, targets) or lightly's (views, targets, filenames) with views = [view_q, view_k], each (N, C, H, W). "
    "Give the training data set a transform that makes two views (lightly.transforms.MoCoV2Transform, or "
    "moco_plugins.TwoViews), and leave collate_fn to its default"
)


def two_views(batch: Any) -> tuple[list[Tensor], Tensor | None]:
    """Return (views, targets) of a training batch; targets is None where there are none.

    Raises:
        TypeError: no two views in it; the message says which transform to add.
    """
    if _are_views(batch):  # views without labels
        return list(batch), None
    if isinstance(batch, Sequence) and not isinstance(batch, str) and batch and _are_views(batch[0]):
        targets = batch[1] if len(batch) > 1 and isinstance(batch[1], Tensor) else None
        return list(batch[0]), targets
    raise TypeError(f"the batch is {_describe(batch)}: no two views of each image. {_CURE}")


def images(batch: Any) -> tuple[Tensor, Tensor | None]:
    """Return (images, targets) of a validation batch; of several views, the first.

    Raises:
        TypeError: no images in it.
    """
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, Sequence) and not isinstance(batch, str) and batch:
        first = batch[0][0] if _are_views(batch[0]) else batch[0]
        if isinstance(first, Tensor) and first.ndim >= 2:
            targets = batch[1] if len(batch) > 1 and isinstance(batch[1], Tensor) and batch[1].ndim == 1 else None
            return first, targets
    raise TypeError(f"the validation batch is {_describe(batch)}; it must be (images, targets), images (N, C, H, W)")


def _are_views(item: Any) -> bool:
    return (
        isinstance(item, (list, tuple))
        and len(item) == 2
        and all(isinstance(view, Tensor) and view.ndim >= 2 for view in item)
    )


def _describe(item: Any, depth: int = 2) -> str:
    if isinstance(item, Tensor):
        return f"a tensor {tuple(item.shape)}"
    if isinstance(item, (list, tuple)) and depth:
        return f"{type(item).__name__}({', '.join(_describe(part, depth - 1) for part in item[:4])})"
    if isinstance(item, dict):
        return f"a dict with {', '.join(map(repr, list(item)[:4]))}"
    return f"a {type(item).__name__}"
