"""A backbone's weights as files: read to start from or to judge, written at the end of a training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...backbones import HEADS
from ...files import replacing, write_atomically
from ..plan.data import Data
from ..plan.errors import SettingsError
from ..plan.settings import Settings

WEIGHTS, ABOUT = "weights.safetensors", "weights.json"
FORMAT = "moco-plugins weights 1"


@dataclass(frozen=True)
class BackboneWeights:
    """The weights of a backbone, and what their file says of them: ``backbone``, ``mean``, ``image_size``, ..."""

    path: Path
    state: Mapping[str, Tensor]
    about: Mapping[str, Any]


def read_weights(path: str | Path) -> BackboneWeights:
    """Read weights of ours (a folder of ``pretrain``, safetensors, ``backbone.pt``) or a state dict that torch has saved.

    Raises:
        SettingsError: there is no such file, or it holds no state dict.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / WEIGHTS
    if not file.is_file():
        raise SettingsError(f"{path}: there is no such file of weights (looked for {file.resolve()})")
    try:
        content, about = _read(file)
    except Exception as error:  # whatever a damaged or foreign file makes a reader raise
        raise SettingsError(
            f"{path}: it cannot be read as weights ({type(error).__name__}): it must be safetensors, or a state dict that "
            "torch.save has written, without pickled code"
        ) from error
    inner = content.get("state_dict", content.get("model", content)) if isinstance(content, Mapping) else {}
    state = {name: value for name, value in inner.items() if isinstance(value, Tensor)} if inner else {}
    if not state:
        raise SettingsError(f"{path}: it holds no state dict (names with tensors)")
    if isinstance(content, Mapping) and inner is not content:
        about = {**{name: value for name, value in content.items() if not isinstance(value, Mapping)}, **about}
    return BackboneWeights(file, state, about)


def _read(file: Path) -> tuple[Any, dict[str, Any]]:
    if file.suffix != ".safetensors":
        return torch.load(file, map_location="cpu", weights_only=True), {}
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        described = (opened.metadata() or {}).get("moco_plugins")
        return {name: opened.get_tensor(name) for name in opened.keys()}, json.loads(described) if described else {}  # noqa: SIM118


def fit(backbone: nn.Module, weights: BackboneWeights, name: str) -> list[str]:
    """Put weights into a backbone; return the names in them that are its classifier's, which is left out.

    Raises:
        SettingsError: they are not weights of this backbone; says what differs.
    """
    own = backbone.state_dict()
    heads = tuple(f"{head}." for head in HEADS)
    left = [key for key in weights.state if key not in own and key.startswith(heads)]
    strange = [key for key in weights.state if key not in own and key not in left]
    absent = [key for key in own if key not in weights.state]
    unlike = [key for key in own if key in weights.state and weights.state[key].shape != own[key].shape]
    if strange or absent or unlike:
        known = weights.about.get("backbone")
        cure = f"; they are of {known}: --backbone {known}" if known and known != name else ""
        problems = [
            *(f"{_some(absent)} not in them" for _ in absent[:1]),
            *(f"{_some(strange)} not in it" for _ in strange[:1]),
            *(f"{k} is {_shape(weights.state[k])} and must be {_shape(own[k])}" for k in unlike[:1]),
        ]
        raise SettingsError(f"{weights.path}: the weights do not fit backbone={name!r} ({'; '.join(problems)}){cure}")
    backbone.load_state_dict({key: weights.state[key] for key in own})
    return left


def _some(names: list[str]) -> str:
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"


def _shape(value: Tensor) -> str:
    return " x ".join(map(str, value.shape)) or "a number"


def write_weights(state: Mapping[str, Tensor], about: Mapping[str, Any], folder: Path) -> Path:
    """Write ``weights.safetensors``, with what it is inside it, and the same for people in ``weights.json``."""
    from safetensors.torch import save

    about = {"format": FORMAT, **about}
    path = folder / WEIGHTS
    with replacing(path) as partial:
        tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        partial.write_bytes(save(tensors, metadata={"format": "pt", "moco_plugins": json.dumps(about)}))
    write_atomically(folder / ABOUT, json.dumps(about, indent=1))
    return path


def loading_code(settings: Settings, data: Data) -> str:
    """Lines of Python that load ``weights.safetensors`` into a backbone."""
    shape = f"channels={data.channels}, image_size={data.image_size}"
    return "\n".join(
        [
            "from safetensors.torch import load_file",
            "from moco_plugins.backbones import build_backbone",
            f"backbone, width = build_backbone({settings.backbone!r}, {shape})",
            f'backbone.load_state_dict(load_file("{WEIGHTS}"))',
            *_in_the_library(str(settings.backbone), data.channels),
        ]
    )


def _in_the_library(name: str, channels: int) -> list[str]:
    """The same without this package, where a few lines say it."""
    if name.startswith("timm/"):
        return ["# or, without moco-plugins:", f'timm.create_model("{name[5:]}", num_classes=0, in_chans={channels})']
    base = name.removesuffix("-cifar")
    if not base.startswith(("resnet", "resnext", "wide_resnet")):
        return []
    stem = [f"model.conv1 = torch.nn.Conv2d({channels}, 64, 3, 1, 1, bias=False)"] if base != name else []
    if not stem and channels != 3:
        stem = [f"model.conv1 = torch.nn.Conv2d({channels}, 64, 7, 2, 3, bias=False)"]
    return [
        "# or, without moco-plugins:",
        f"model = torchvision.models.{base}()",
        *stem,
        "model.fc = torch.nn.Identity()",
        f'model.load_state_dict(load_file("{WEIGHTS}"))',
    ]
