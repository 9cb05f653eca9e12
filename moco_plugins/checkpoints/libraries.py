"""Plain state dicts: torchvision's and timm's models, with their classifiers or without, and anybody's."""

from __future__ import annotations

from pathlib import Path

import torch

from . import architectures
from .dialects import TIMM_VIT, TORCHVISION_VIT
from .formats import Format
from .names import dialect_of, in_dialect, in_library_names
from .reading import Content
from .weights import Weights


def read_plain(content: Content) -> Weights | None:
    """A state dict of one network, whole or cut."""
    if not content.state or content.kind == "folder":
        return None
    about = {name: content.raw[name] for name in ("epoch", "arch") if isinstance(content.raw.get(name), (int, str))}
    return Weights("", content.take(""), about=about)


def library_of(weights: Weights) -> set[str]:
    """The libraries that have this network under these names."""
    network = weights.architecture or architectures.guess(weights.backbone)
    spoken = dialect_of(weights.backbone)
    if spoken is not None and spoken.family == "resnet":
        return {"torchvision", "timm"}
    if spoken is not None:
        return {"timm"} if spoken is TIMM_VIT else {"torchvision"}
    if network is None:
        return set()
    return {"timm"} if network.name.startswith("timm/") else {"torchvision"}


def write_torchvision(weights: Weights, path: Path, part: str) -> None:
    """A state dict that torchvision's model takes with ``strict=True``, once its classifier is an ``nn.Identity()``."""
    _write(weights, path, "torchvision")


def write_timm(weights: Weights, path: Path, part: str) -> None:
    """A state dict that ``timm.create_model(name, num_classes=0)`` takes with ``strict=True``."""
    _write(weights, path, "timm")


def _write(weights: Weights, path: Path, library: str) -> None:
    state, _ = in_library_names(weights.backbone)
    if library not in library_of(weights):
        spoken = dialect_of(state)
        if spoken is None or spoken.family != "vit":
            what = weights.architecture or f"a network with {next(iter(state))}"
            raise ValueError(f"{library} has no model with the tensors of {what}")
        state = in_dialect(state, TORCHVISION_VIT if library == "torchvision" else TIMM_VIT)
    torch.save(state, path)


FORMATS = {
    "state-dict": Format(
        "anybody's state dict of one network; torchvision's and timm's are told", read_plain, loose=True
    ),
    "torchvision": Format("state dicts of torchvision's models", write=write_torchvision),
    "timm": Format("state dicts of timm's models", write=write_timm),
}
