"""Projection and prediction heads under the names of :func:`moco_plugins.core.variants.projection_head`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


def in_sequence(state: Mapping[str, Tensor]) -> dict[str, str] | None:
    """Say which place in an ``nn.Sequential`` each tensor of a head has: its name there -> its name here.

    A head is linear layers with BatchNorm or not, with ReLU between them, whatever they are called; they come in the order
    of the state dict. None where there is something else in it.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        path, _, leaf = name.rpartition(".")
        modules.setdefault(path, {})[leaf] = value
    if modules and all(re.fullmatch(r"(.*\.)?\d+", path) for path in modules):
        # Some containers sort their names as text.
        modules = dict(sorted(modules.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])]))
    places: dict[str, str] = {}
    place = 0
    for path, leaves in modules.items():
        weight = leaves.get("weight")
        norm = "running_mean" in leaves
        if not norm and (weight is None or weight.ndim != 2):
            return None
        if not norm and place:
            place += 1  # the ReLU before it
        places |= {f"{place}.{leaf}": f"{path}.{leaf}" if path else leaf for leaf in leaves}
        place += 1
    return places


@dataclass(frozen=True)
class HeadForm:
    """What a head is built of: linear layers, their widths, BatchNorm between them and after the last one."""

    layers: int
    hidden_dim: int
    out_dim: int
    batch_norm: bool
    last_norm: bool


def form_of(state: Mapping[str, Tensor]) -> HeadForm | None:
    """Read the form of a head in sequence; None where there is none."""
    linear = [value for name, value in state.items() if name.endswith("weight") and value.ndim == 2]
    if not linear:
        return None
    norms = sum(name.endswith("running_mean") for name in state)
    last = norms == len(linear)
    return HeadForm(len(linear), linear[0].shape[0], linear[-1].shape[0], norms > 0, last)
