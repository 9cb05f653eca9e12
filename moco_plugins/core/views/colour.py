"""Colour operations of many images at once, in place, each equal to torchvision's on float images.

Images are planes (C, N, H, W) from 0 to 1: each colour of all images lies together, which is what these operations run
over. A factor is a number, or a tensor (N, 1, 1) with one for each image. Selections are made by arithmetic with 0 and
1: torch's ``where`` costs twenty passes on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .draws import BRIGHTNESS, CONTRAST, HUE, SATURATION

Factor = float | Tensor
_TINY = 1e-20


@functools.cache
def per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers as (C, 1, 1, 1), kept: making them again would cost more than what is done with them."""
    return torch.tensor(values, device=device).view(-1, 1, 1, 1)


def luma(x: Tensor) -> Tensor:
    """Grey of planes: (C, N, H, W) -> (N, H, W); ITU-R 601 of three colours, the plane itself of one."""
    if x.shape[0] == 1:
        return x[0].clone()
    return torch.mul(x[0], 0.2989).add_(x[1], alpha=0.587).add_(x[2], alpha=0.114)


def grey(x: Tensor) -> None:
    """All colours become the grey of the pixel."""
    x.copy_(luma(x))


def brightness(x: Tensor, factor: Factor) -> None:
    """Multiply."""
    x.mul_(factor).clamp_(0, 1)


def contrast(x: Tensor, factor: Factor) -> None:
    """Move away from the mean grey of each image."""
    mean = luma(x).mean((-2, -1), keepdim=True)
    x.mul_(factor).add_(mean.mul_(1 - factor)).clamp_(0, 1)


def saturation(x: Tensor, factor: Factor) -> None:
    """Move away from the grey of each pixel."""
    pale = luma(x).mul_(1 - factor)
    x.mul_(factor).add_(pale).clamp_(0, 1)


def hue(x: Tensor, factor: Factor) -> None:
    """Turn the hue of HSV by ``factor``, a fraction of the full circle."""
    r, g, b = x
    top, low = torch.maximum(r, g), torch.minimum(r, g)
    torch.maximum(top, b, out=top)
    torch.minimum(low, b, out=low)
    chroma = top - low
    # Six times the hue, times chroma: from the two colours that are not the largest, counted from the one that is.
    six, other, is_top = r - g, b - r, torch.empty_like(r)
    six.add_(chroma, alpha=4)
    six.lerp_(other.add_(chroma, alpha=2), torch.eq(g, top, out=is_top))
    six.lerp_(torch.sub(g, b, out=other), torch.eq(r, top, out=is_top))
    six.div_(torch.clamp_min(chroma, _TINY, out=other)).add_(6 * factor)
    six.sub_(torch.mul(six, 1 / 6, out=other).floor_(), alpha=6)  # to [0, 6)
    # And back: each colour is the largest or the smallest for two sixths of the circle, and on a slope between.
    away = six - per_channel((3.0, 2.0, 4.0), x.device)
    away.abs_().sub_(1).clamp_(0, 1)
    torch.addcmul(low, chroma, away[0], out=r)
    torch.addcmul(top, chroma, away[1], value=-1, out=g)
    torch.addcmul(top, chroma, away[2], value=-1, out=b)


def solarise(x: Tensor, threshold: float) -> None:
    """Turn over what is at least as bright as ``threshold``."""
    x.lerp_(1 - x, torch.ge(x, threshold, out=torch.empty_like(x)))


_OPERATIONS: dict[int, Callable[[Tensor, Factor], None]] = {
    BRIGHTNESS: brightness,
    CONTRAST: contrast,
    SATURATION: saturation,
    HUE: hue,
}


def jitter(x: Tensor, order: Sequence[int], factors: Sequence[float] | Tensor) -> None:
    """Jitter the colours of planes (C, N, H, W), C 1 or 3; grey images have no saturation and no hue.

    Args:
        order: the operations, first to last.
        factors: by operation, see :class:`moco_plugins.core.views.draws.Looks`: numbers, or (4, N, 1, 1).
    """
    for operation in order:
        if operation in _operations(x):
            _OPERATIONS[operation](x, factors[operation])


def jitter_each(x: Tensor, order: Tensor, factors: Tensor) -> None:
    """The same, each image in an order of its own: those whose next operation is the same are taken together.

    Args:
        order: (N, 4), on the CPU. factors: (4, N, 1, 1).
    """
    if bool((order == order[0]).all()):
        return jitter(x, order[0].tolist(), factors)
    for operations in order.unbind(1):
        for operation in _operations(x):
            rows = (operations == operation).nonzero()[:, 0]
            on_some(x, rows, _OPERATIONS[operation], factors[operation])


def _operations(x: Tensor) -> tuple[int, ...]:
    return (BRIGHTNESS, CONTRAST, SATURATION, HUE) if len(x) == 3 else (BRIGHTNESS, CONTRAST)


def on_some(
    x: Tensor, rows: Tensor, operation: Callable[..., Tensor | None], *arguments: Tensor, axis: int = 0
) -> None:
    """Change some images of planes (C, N, H, W) in place.

    Args:
        rows: their numbers, on the CPU.
        operation: (part of the planes, part of each argument) -> None, or what takes the part's place.
        arguments: with a row for each image, along ``axis``.
    """
    if rows.numel() == 0:
        return
    if rows.numel() == x.shape[1]:
        changed = operation(x, *arguments)
        if changed is not None:
            x.copy_(changed)
        return
    there = rows.to(x.device, non_blocking=True)
    part = x.index_select(1, there)
    changed = operation(part, *(argument.index_select(axis, there) for argument in arguments))
    x.index_copy_(1, there, part if changed is None else changed)
