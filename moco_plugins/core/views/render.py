"""Views from drawn parameters: a batch is cut out, coloured and blurred part by part, each part in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from . import colour
from .draws import Crops, Look, Looks
from .recipes import Recipe
from .space import Axis, as_planes, blur, crop_axes, gaussian, gaussians, reach_of, resized_crops

#: Pixels of the views of one part on the CPU: with all that is made in between they stay in a core's cache.
_PIXELS = 2**15

Parameters = TypeVar("Parameters", Crops, Looks, Axis)


def joined(parts: Sequence[Parameters]) -> Parameters:
    """Parameters of several views, one after the other."""
    return type(parts[0])(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _chosen(parameters: Parameters, rows: Tensor | slice) -> Parameters:
    return type(parameters)(*(column[rows] for column in parameters))


def render(
    images: Tensor,
    recipe: Recipe,
    looks: Looks,
    crops: Crops | None = None,
    normalise: Callable[[Tensor], None] = lambda planes: None,
) -> Tensor:
    """Make M views of N images: (N, C, H, W), uint8 or float from 0 to 1 -> (M, C, H, W), float32, where the images are.

    Args:
        recipe: what does not differ between the views.
        looks: M rows. View i is of image i modulo N.
        crops: M rows; None: the images are cut out already, and only what comes after is done.
        normalise: applied in place to planes (C, n, H, W) of finished views.
    """
    size = tuple(images.shape[2:]) if crops is None else recipe.size
    device = images.device
    views = torch.empty(len(looks.grey), images.shape[1], *size, device=device)
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        rows, parts = _parts(looks, size, device)
        looks = _chosen(looks, rows)
        factors = looks.factors.float().T.contiguous().to(device, non_blocking=True)[:, :, None, None]
        taps = gaussians(looks.sigma, recipe.kernel, device)
        axes = crop_axes(_chosen(crops, rows), recipe.size, device) if crops is not None else ()
        rows = rows.to(device, non_blocking=True)
        sources = rows % len(images)
        for part in parts:
            planes = images.index_select(0, sources[part])
            planes = resized_crops(planes, *(_chosen(axis, part) for axis in axes)) if axes else as_planes(planes)
            if part.stop - part.start == 1:
                planes = _look(planes, recipe, _chosen(looks, part).one())
            else:
                _look_each(planes, recipe, _chosen(looks, part), factors[:, part], taps[:, part])
            normalise(planes)
            views.index_copy_(0, rows[part], planes.transpose(0, 1))
    return views


def render_one(view: Tensor, recipe: Recipe, look: Look, normalise: Callable[[Tensor], None]) -> Tensor:
    """What comes after the crop, for one view (C, H, W); see :func:`render`, which gives the same."""
    with torch.no_grad(), torch.autocast(view.device.type, enabled=False):
        planes = _look(as_planes(view[None]), recipe, look)
        normalise(planes)
    return planes[:, 0]


def _parts(looks: Looks, size: Sequence[int], device: torch.device) -> tuple[Tensor, list[slice]]:
    """Views in the order in which they are made, and which of these are made together.

    On the CPU those with the same order of the jitter, as many as stay in the cache; else all.
    """
    count = len(looks.grey)
    if device.type != "cpu":
        return torch.arange(count), [slice(0, count)]
    most = max(1, _PIXELS // (size[0] * size[1]))
    if most == 1:
        return torch.arange(count), [slice(row, row + 1) for row in range(count)]
    code, rows = (looks.order * torch.tensor([125, 25, 5, 1])).sum(1).sort(stable=True)
    ends = torch.unique_consecutive(code, return_counts=True)[1].cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    return rows, [
        slice(at, min(at + most, end))
        for start, end in zip(starts, ends, strict=True)
        for at in range(start, end, most)
    ]


def _look_each(planes: Tensor, recipe: Recipe, looks: Looks, factors: Tensor, taps: Tensor) -> None:
    """:func:`_look` of many views, planes (C, N, H, W), with their factors and the taps of their blurs."""
    coloured = len(planes) in (1, 3)
    if coloured and not recipe.grey_first:
        colour.jitter_each(planes, looks.order, factors)
    if len(planes) == 3:
        colour.on_some(planes, _where(looks.grey), colour.grey)
    if coloured and recipe.grey_first:
        colour.jitter_each(planes, looks.order, factors)
    taps = taps[: reach_of(float(looks.sigma.max())) + 1]
    colour.on_some(planes, _where(looks.sigma > 0), blur, taps, axis=1)
    colour.on_some(planes, _where(looks.solarise), lambda part: colour.solarise(part, recipe.threshold))


def _where(mask: Tensor) -> Tensor:
    return mask.nonzero()[:, 0]


def _look(planes: Tensor, recipe: Recipe, look: Look) -> Tensor:
    """Everything after the crop, of one view, planes (C, 1, H, W) from 0 to 1."""
    coloured = len(planes) in (1, 3)
    if coloured and not recipe.grey_first:
        colour.jitter(planes, look.order, look.factors)
    if look.grey and len(planes) == 3:
        colour.grey(planes)
    if coloured and recipe.grey_first:
        colour.jitter(planes, look.order, look.factors)
    if look.sigma > 0:
        planes = blur(planes, gaussian(look.sigma, recipe.kernel))
    if look.solarise:
        colour.solarise(planes, recipe.threshold)
    return planes
