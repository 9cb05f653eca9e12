"""What lightly itself does for MoCo, to be timed beside ours by ``moco-plugins speed``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def queue_loss(size: int, dim: int, temperature: float, device: str) -> Callable[[Tensor, Tensor], object] | None:
    """lightly's NTXentLoss with memory bank: forward, backward and enqueue."""
    if importlib.util.find_spec("lightly") is None:
        return None
    from lightly.loss import NTXentLoss

    criterion = NTXentLoss(temperature, memory_bank_size=(size, dim)).to(device)
    return lambda query, key: criterion(query, key).backward()


def ema(query: nn.Module, key: nn.Module, momentum: float) -> Callable[[], object] | None:
    """lightly's update_momentum."""
    if importlib.util.find_spec("lightly") is None:
        return None
    from lightly.models.utils import update_momentum

    return lambda: update_momentum(query, key, momentum)


def views(image_size: int) -> Callable[[Any], object] | None:
    """lightly's MoCoV2Transform, of one PIL image."""
    if importlib.util.find_spec("lightly") is None:
        return None
    from lightly.transforms.moco_transform import MoCoV2Transform

    transform: Callable[[Any], object] = MoCoV2Transform(image_size)
    return transform


BASELINES: dict[str, Callable[..., Callable[..., object] | None]] = {
    "queue_loss": queue_loss,
    "ema": ema,
    "views": views,
}
