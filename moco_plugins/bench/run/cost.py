"""What a run costs: encoder passes, peak memory, parameters."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class PassCounter:
    """Counts the images that go through a method's encoders, forward and backward, until :meth:`stop`.

    An encoder is any module of the method built like the backbone: key encoders and teachers are counted too. A forward
    pass whose output carries a gradient is taken to have a backward pass. MoCo's drift probe, which is ours and not the
    method's, rests while it counts.
    """

    def __init__(self, method: Any, backbone: nn.Module) -> None:
        self.forward = self.backward = 0
        kind = _fingerprint(backbone)
        self._method = method
        self._probe: Any = getattr(method, "drift_probe", None)
        if self._probe is not None:
            self._method.drift_probe = None
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(self._count)
            for module in method.modules()
            if type(module) is type(backbone) and _fingerprint(module) == kind
        ]

    def _count(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not module.training or not inputs:
            return
        self.forward += len(inputs[0])
        if isinstance(output, Tensor) and output.requires_grad:
            self.backward += len(inputs[0])

    def stop(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._probe is not None:
            self._method.drift_probe, self._probe = self._probe, None


def _fingerprint(module: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, parameter.shape) for name, parameter in module.named_parameters()]


class PeakMemory:
    """The largest memory of the process while it counts, in MiB: of the GPU where one is used, else resident."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        if device is not None and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # Linux: forget the peak so far

    def mib(self) -> float:
        """The peak until now."""
        if self.device is not None and self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 2**10
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
