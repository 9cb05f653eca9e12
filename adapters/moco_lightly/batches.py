"""Read the batches that reach a LightningModule: lightly's collate, plain pairs, several loaders."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moco_plugins.core.checks import local_crops

_CURE = (
    "It must be (views, targets) or lightly's (views, targets, filenames) with views = [view_q, view_k], each (N, C, H, W). "
    "Give the training data set a transform that makes two views (lightly.transforms.MoCoV2Transform, or "
    "moco_plugins.TwoViews), and leave collate_fn to its default"
)


def two_views(batch: Any) -> tuple[list[Tensor], Tensor | None]:
    """Return (views, targets) of a training batch; targets is None where there are none.

    Of the batches of several loaders (Lightning's CombinedLoader: a dict or list of batches) those with two views are
    joined; images whose loader gives no targets have -1.

    Raises:
        TypeError: no two views in it; the message says which transform to add.
        ValueError: two tensors that are no views of the same images, such as an image and its mask.
    """
    found = _read(batch)
    if found is not None:
        return found
    parts = [read for read in map(_read, _batches(batch)) if read is not None]
    if not parts:
        raise TypeError(f"the batch is {_describe(batch)}: no two views of each image. {_CURE}")
    return _joined(parts)


def _read(batch: Any) -> tuple[list[Tensor], Tensor | None] | None:
    if _is_pair(batch):  # views without labels
        return _alike(batch), None
    if isinstance(batch, Sequence) and not isinstance(batch, str) and batch and _nested_pair(batch[0]):
        return list(batch[0]), batch[1] if len(batch) > 1 and isinstance(batch[1], Tensor) else None
    if isinstance(batch, Sequence) and not isinstance(batch, str) and batch and _is_pair(batch[0]):
        targets = batch[1] if len(batch) > 1 and isinstance(batch[1], Tensor) else None
        return _alike(batch[0]), targets
    return None


def _nested_pair(views: Any) -> bool:
    """Two views that are dicts of tensors, such as tokens and their mask."""
    both = isinstance(views, (list, tuple)) and len(views) == 2 and all(isinstance(view, Mapping) for view in views)
    return both and views[0].keys() == views[1].keys()


def _batches(batch: Any) -> list[Any]:
    """The batches that one batch of several loaders is made of."""
    if isinstance(batch, Mapping):
        return list(batch.values())
    several = isinstance(batch, (list, tuple)) and all(isinstance(part, (list, tuple, type(None))) for part in batch)
    return list(batch) if several else []


def _joined(parts: list[tuple[list[Tensor], Tensor | None]]) -> tuple[list[Tensor], Tensor | None]:
    if len(parts) == 1:
        return parts[0]
    shapes = {tuple(views[0].shape[1:]) for views, _ in parts}
    if len(shapes) > 1:
        raise ValueError(
            f"the loaders give views of shapes {', '.join(map(str, sorted(shapes)))}; all views of a step need one shape"
        )
    joined = [torch.cat([views[i] for views, _ in parts]) for i in range(min(len(views) for views, _ in parts))]
    if all(targets is None for _, targets in parts):
        return joined, None
    none = torch.full((1,), -1, device=joined[0].device)
    return joined, torch.cat([none.expand(len(views[0])) if t is None else t for views, t in parts])


def _alike(views: Sequence[Tensor]) -> list[Tensor]:
    first, second, *crops = views
    if first.shape != second.shape or first.dtype != second.dtype:
        raise ValueError(
            f"the batch holds a tensor {tuple(first.shape)} of {first.dtype} and one {tuple(second.shape)} of "
            f"{second.dtype}: an image and something else (a mask?), not two views of one image. {_CURE}"
        )
    return [first, second, *crops]


def images(batch: Any) -> tuple[Tensor, Any]:
    """Return (images, targets) of a batch for evaluation; of several views, the first. Targets as they are, or None.

    Raises:
        TypeError: no images in it.
    """
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, Sequence) and not isinstance(batch, str) and batch:
        first = batch[0][0] if _is_pair(batch[0]) else batch[0]
        if isinstance(first, Tensor) and first.ndim >= 2:
            second = batch[1] if len(batch) > 1 else None
            # Two tensors alike are two views without targets.
            is_target = isinstance(second, Tensor) and not (second.shape == first.shape and second.dtype == first.dtype)
            return first, second if is_target else None
    raise TypeError(f"the batch is {_describe(batch)}; it must be (images, targets), images (N, C, H, W)")


def pair_of(batch: Any) -> list[Tensor] | None:
    """Return the two views of a batch for evaluation, which may as well have one, or (image, target)."""
    pair: Any = batch if _is_pair(batch) else batch[0] if isinstance(batch, (list, tuple)) and batch else None
    alike = _is_pair(pair) and pair[0].shape == pair[1].shape and pair[0].dtype == pair[1].dtype
    return list(pair) if alike else None


def file_names(batch: Any) -> list[str] | None:
    """Return the file names of a batch, as lightly's data sets give them; None where there are none."""
    for part in batch if isinstance(batch, (list, tuple)) else ():
        if isinstance(part, (list, tuple)) and part and all(isinstance(name, str) for name in part):
            return list(part)
    return None


def ids(batch: Any) -> Tensor | None:
    """Return a number for each image of (views, targets, ids or lightly's filenames), (N,); None where there are none.

    A file's number is made of its name, and is the same in every process and run.
    """
    names = batch[2] if isinstance(batch, (list, tuple)) and len(batch) > 2 else None
    if isinstance(names, Tensor):
        return names
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        return None
    digests = [hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest() for name in names]
    return torch.tensor([int.from_bytes(digest, "big") >> 1 for digest in digests])


def labels(targets: Any) -> Tensor | None:
    """Return targets that are one whole number an image, (N,), -1 for none; None for none at all.

    Raises:
        ValueError: several labels an image, or soft ones.
    """
    if targets is None:
        return None
    if not isinstance(targets, Tensor) or targets.ndim != 1 or targets.is_floating_point():
        raise ValueError(
            f"the targets are {_describe(targets)}; online probe and kNN take one class an image, whole numbers (N,), "
            "-1 for none. Leave num_classes=None for other targets, and judge moco.embed(images) with what suits them"
        )
    return targets


def _is_pair(item: Any) -> bool:
    return (
        isinstance(item, (list, tuple))
        and len(item) - len(local_crops(item)) == 2  # those are of multi-crop
        and all(isinstance(view, Tensor) and view.ndim >= 2 for view in item)
    )


def _describe(item: Any, depth: int = 2) -> str:
    if isinstance(item, Tensor):
        return f"a tensor {tuple(item.shape)} of {item.dtype}"
    if isinstance(item, (list, tuple)) and depth:
        return f"{type(item).__name__}({', '.join(_describe(part, depth - 1) for part in item[:4])})"
    if isinstance(item, dict):
        return f"a dict with {', '.join(map(repr, list(item)[:4]))}"
    return f"a {type(item).__name__}"
