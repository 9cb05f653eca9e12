"""Mixed precision where MMEngine's AmpOptimWrapper refuses: on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.optim import OptimWrapper
from torch import nn


class AutocastOptimWrapper(OptimWrapper):
    """Run the forward pass under torch's autocast in bfloat16, on any device; no loss scaling, which bfloat16 does not need.

    Args:
        dtype: "bfloat16" (default), or "float32" to switch it off.
        options: see MMEngine's OptimWrapper.
    """

    def __init__(self, dtype: str = "bfloat16", **options: Any) -> None:
        super().__init__(**options)
        if dtype not in ("bfloat16", "float32"):
            raise ValueError(
                f"dtype={dtype!r} must be 'bfloat16' or 'float32'; float16 needs loss scaling: AmpOptimWrapper, on a GPU"
            )
        self.enabled = dtype == "bfloat16"

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """See MMEngine."""
        device = next((p.device.type for p in model.parameters()), "cpu")
        with super().optim_context(model), torch.autocast(device, torch.bfloat16, enabled=self.enabled):
            yield
