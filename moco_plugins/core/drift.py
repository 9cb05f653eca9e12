"""How stale the keys are: some key images of recent steps, encoded then and again now."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..steps.distributed import world_size
from .nested import View, first, map_tensors, rows
from .normalise import unit_rows


class Snapshot(NamedTuple):
    """Some key images of one step and the keys they had then."""

    step: int
    images: View
    keys: Tensor


@dataclass(eq=False, repr=False)
class DriftProbe:
    """Keeps small batches of recent key images, to see how far keys of some age are from today's key encoder.

    The images are encoded once more by themselves when they are taken, and again when the drift is asked for, so that
    BatchNorm sees the same batch both times and drift is due to the weights alone.

    Args:
        size: images of each snapshot.
        every: optimiser steps between two snapshots.
        keep: number of snapshots.
    """

    size: int
    every: int = 1
    keep: int = 8
    snapshots: deque[Snapshot] = field(default_factory=deque)

    def take(self, encoder: nn.Module, images: View, step: int, keys_in_queue: int, keys_per_image: int) -> None:
        """Take a snapshot, unless the last one is too young: those kept are spread over the steps in the queue."""
        if keys_in_queue:
            steps_in_queue = keys_in_queue // (rows(images) * keys_per_image * world_size())
            self.every = max(1, steps_in_queue // self.keep)
        if self.snapshots and step - self.snapshots[-1].step < self.every:
            return
        kept = map_tensors(images, lambda tensor: tensor[: self.size].detach().clone())
        self.snapshots.append(Snapshot(step, kept, encode_quietly(encoder, kept)))
        while len(self.snapshots) > self.keep:
            self.snapshots.popleft()

    def drift(self, encoder: nn.Module, step: int) -> list[tuple[int, float]]:
        """Return (age in steps, mean of 1 - cosine between the key then and now), the youngest first."""
        return [
            (step - old.step, float((1 - (old.keys * encode_quietly(encoder, old.images)).sum(1)).mean()))
            for old in reversed(self.snapshots)
        ]

    def metrics(self, encoder: nn.Module, step: int) -> dict[str, float]:
        """Return key_drift, the mean over all ages that are kept; empty before the first snapshot."""
        drifts = [drift for _, drift in self.drift(encoder, step)]
        return {"key_drift": sum(drifts) / len(drifts)} if drifts else {}


@torch.no_grad()
def encode_quietly(encoder: nn.Module, images: View) -> Tensor:
    """Encode in train mode and normalise, the same way at any time and without leaving a trace in the encoder."""
    buffers = [(buffer, buffer.clone()) for buffer in encoder.buffers()]
    modes = [(module, module.training) for module in encoder.modules()]
    encoder.train()
    device = first(images).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        keys = unit_rows(encoder(images))
    for module, mode in modes:
        module.training = mode
    for buffer, before in buffers:
        buffer.copy_(before)
    return keys
