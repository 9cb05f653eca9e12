"""The recipe that all methods share: backbone of a seed, views, normalisation, optimiser, schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...backbones import build_backbone
from ...data.loader import StepLoader, fitting_workers, make_loader
from ...data.seeding import key, random_state
from ...hooks import manager as plugins
from ..plan.data import Data
from ..plan.presets import OWN_VIEWS
from ..plan.settings import Settings
from .weights import start_from

#: Views of the core that normalise by themselves; the harness does it instead, as in evaluation.
_NORMALISING = ("v1", "v2", "v2+", "v3")


class Normalise:
    """(x - mean) / std, per channel, in the memory format that convolutions like."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        """Normalise (N, C, H, W)."""
        if images.device != self.mean.device:
            self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        return ((images - self.mean) / self.std).contiguous(memory_format=torch.channels_last)


def views_name(settings: Settings, method: str) -> str:
    """The name of a method's views: the common ones, or with "own" those of its paper."""
    if settings.views != "own":
        return str(settings.views)
    return str(getattr(plugins.method_factory(method), "views", None) or OWN_VIEWS.get(method, "v2"))


def build_views(settings: Settings, method: str) -> Any:
    """The two-view transform of a method."""
    name, options = views_name(settings, method), dict(settings.view_options)
    if name in _NORMALISING:
        options.update(mean=(), std=())
    return plugins.build_views(name, settings.image_size or 0, options)


def build_seeded_backbone(settings: Settings, data: Data, seed: int) -> tuple[nn.Module, int]:
    """The backbone of a seed, or with ``init`` of a file: the same weights for every method."""
    with random_state(key(seed, "backbone")):
        backbone, width = build_backbone(str(settings.backbone), data.channels, data.image_size, settings.pretrained)
    if settings.init is not None:
        start_from(backbone, settings.init, str(settings.backbone))
    return backbone.to(memory_format=torch.channels_last), width


def build_loader(settings: Settings, data: Data, method: str, seed: int) -> StepLoader:
    """The training loader of a run."""
    views, finish = build_views(settings, method), Normalise(data.mean, data.std)
    workers = settings.workers
    if workers is None:
        workers = fitting_workers(data.pretrain, views, settings.devices)
    return make_loader(data.pretrain, views, finish, settings.batch_size or 1, key(seed, "data"), workers)
