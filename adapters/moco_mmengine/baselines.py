"""What MMEngine itself does, to be timed beside ours by ``moco-plugins speed``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from torch import nn


def ema(query: nn.Module, key: nn.Module, momentum: float) -> Callable[[], object] | None:
    """MMEngine's ExponentialMovingAverage, whose momentum is the fraction that is replaced."""
    if importlib.util.find_spec("mmengine") is None:
        return None
    from mmengine.model import ExponentialMovingAverage

    average = ExponentialMovingAverage(query, momentum=1 - momentum)
    return lambda: average.update_parameters(query)


BASELINES = {"ema": ema}
