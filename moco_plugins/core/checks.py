"""Errors that name the argument, its value and the cure. Shapes and host numbers only: no look at a device."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .momentum import value_at
from .nested import View, tensors
from .variants import Variant


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number, numpy's as well, as an int.

    Raises:
        ValueError: it is not one of at least ``least``.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
    return int(value)


def suggested_queue_size(images: int) -> int:
    """The K that :func:`queue_advice` gives a data set of N images: the largest power of two up to N / 4, at least 1."""
    return 1 << max(0, (images // 4).bit_length() - 1)


def queue_advice(queue_size: int, images: int) -> str | None:
    """What to say of a queue of K keys over a data set of N images; None where it is smaller than the data set.

    An image is seen once an epoch, so a queue of K >= N keys holds its key of the epoch before: the image is its own
    negative. With a new shuffle each epoch the gap between two visits is 1 to 2 N steps of one image, and K = N / 4, to
    which the advice rounds down, leaves that to K^2 / (2 N^2) = 3 % of the images.

    Args:
        queue_size: K; 0 for none.
        images: N, images of an epoch, of all processes.
    """
    if not 0 < images <= queue_size:
        return None
    return (
        f"queue_size={queue_size} is as large as the data set of {images} images or larger, so the queue holds each image's "
        f"own key of the epoch before, as a negative. Try queue_size={suggested_queue_size(images)}"
    )


def check_settings(settings: Variant, backbone: object, bn_buffers: str, **whole: int) -> None:
    """Check MoCo's arguments; ``whole`` are further whole numbers, of at least 1 (drift_probe: 0)."""
    if not isinstance(backbone, nn.Module):
        hint = " (for MMEngine's configs there is moco_mmengine.MoCo)" if isinstance(backbone, Mapping) else ""
        raise TypeError(f"backbone={backbone!r} is a {type(backbone).__name__}; it must be a torch.nn.Module{hint}")
    tensors = (*backbone.named_parameters(), *backbone.named_buffers())
    lazy = [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"backbone has parameters without a shape yet, such as {lazy[0]} (lazy modules); run one batch of images "
            "through it first"
        )
    least = {"queue_size": 0, "drift_probe": 0}
    whole = {
        **whole,
        "queue_size": settings.queue_size,
        "projection_dim": settings.projection_dim,
        "hidden_dim": 1 if settings.hidden_dim is None else settings.hidden_dim,
        "projection_layers": settings.projection_layers,
    }
    for name, value in whole.items():
        whole_number(name, value, least.get(name, 1))
    if not settings.queue_size and not settings.in_batch_negatives:
        raise ValueError(
            "queue_size=0 leaves nothing to contrast with; give a queue_size of at least 1, or in_batch_negatives=True"
        )
    if not value_at(settings.temperature, 0, None) > 0:
        raise ValueError(f"temperature={settings.temperature!r} must be greater than 0 (0.07 in MoCo v1, 0.2 in v2)")
    if bn_buffers not in ("own", "copy", "ema"):
        raise ValueError(f"bn_buffers={bn_buffers!r} must be 'own', 'copy' or 'ema'")
    if settings.shuffle_bn not in (True, False):
        raise ValueError(f"shuffle_bn={settings.shuffle_bn!r} must be 'auto', True or False")


def check_views(views: Sequence[View]) -> tuple[Any, ...]:
    """Return the two views, (N, C, H, W) each or nested structures of tensors (N, ...), or say what is wrong with them.

    Local crops, smaller images (N, C, H, W), may follow and are returned as well.
    """
    several = not isinstance(views, (Tensor, str)) and isinstance(views, Sequence)
    local = local_crops(views) if several else []
    if not several or len(views) - len(local) != 2:
        what = f"a tensor of shape {tuple(views.shape)}" if isinstance(views, Tensor) else f"a {type(views).__name__}"
        count = f" of {len(views)}" if isinstance(views, Sequence) else ""
        raise TypeError(f"views is {what}{count}; MoCo takes two views of each image, [view_q, view_k]: see TwoViews")
    x_q, x_k = views[:2]
    found_q, found_k = check_batch(x_q, views), check_batch(x_k, views)
    if len(found_q[0]) != len(found_k[0]):
        raise ValueError(
            f"views have shapes {_shapes(x_q)} and {_shapes(x_k)}; both must hold the same N >= 1 images, row i of "
            "each showing image i"
        )
    if x_q is x_k or (
        len(found_q) == len(found_k) and all(_same_memory(a, b) for a, b in zip(found_q, found_k, strict=True))
    ):
        raise ValueError("views are twice the same tensor, so there is nothing to learn; make two views: see TwoViews")
    return x_q, x_k, *local


def local_crops(views: Sequence[Any]) -> list[Tensor]:
    """The views after the first two, where these are the local crops of multi-crop: of as many images, but smaller."""
    if len(views) < 3 or not all(isinstance(view, Tensor) and view.ndim == 4 for view in views):
        return []
    first, crops = views[0], list(views[2:])
    smaller = all(crop.shape[2:].numel() < first.shape[2:].numel() for crop in crops)
    return crops if smaller and all(crop.shape[0] == first.shape[0] for crop in crops) else []


def check_batch(view: View, views: Sequence[View]) -> list[Tensor]:
    """Return the tensors of a view, all of the same N >= 1 rows; ``views`` are for the message."""
    try:
        found = [tensor for _, tensor in tensors(view)]
    except TypeError as error:
        kinds = " and ".join(type(other).__name__ for other in views)
        raise TypeError(
            f"views holds {kinds}, and among them a {error}; each must be a tensor (N, C, H, W), or a nested structure "
            "(dict, list, tuple) of tensors (N, ...)"
        ) from None
    if not found or any(tensor.ndim == 0 or len(tensor) != len(found[0]) or not len(tensor) for tensor in found):
        raise ValueError(
            f"views have shapes {' and '.join(_shapes(other) for other in views)}; both must hold the same N >= 1 images, "
            "row i of each tensor belonging to image i"
        )
    return found


def _shapes(view: View) -> str:
    if isinstance(view, Tensor):
        return str(tuple(view.shape))
    try:
        return "{" + ", ".join(f"{path}: {tuple(tensor.shape)}" for path, tensor in tensors(view)) + "}"
    except TypeError:
        return type(view).__name__


def _same_memory(a: Tensor, b: Tensor) -> bool:
    if torch.compiler.is_compiling() or a.device != b.device or a.numel() == 0:
        return False
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def second_backbone(backbone: nn.Module, key_encoder: nn.Module | None) -> nn.Module:
    """Return the backbone of the key encoder: the one given, or a copy."""
    if key_encoder is backbone:
        raise ValueError("key_encoder is the backbone itself; it must be a second module of the same architecture")
    if key_encoder is None:
        key_encoder = _copied(backbone)
    shared = {id(p) for p in backbone.parameters()} & {id(p) for p in key_encoder.parameters()}
    if shared:
        raise ValueError(
            f"key_encoder shares {len(shared)} parameters with the backbone, so they would not lag behind it; build it "
            "anew, with parameters of its own"
        )
    return key_encoder


def _copied(backbone: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(backbone)
    except Exception as error:
        raise TypeError(
            f"backbone ({type(backbone).__name__}) cannot be deep-copied to make the key encoder ({error}); build a second "
            "one of the same architecture and pass it as key_encoder="
        ) from error
