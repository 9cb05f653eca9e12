"""A backbone's weights as files: read to start from or to judge, written at the end of a training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...checkpoints import Weights, load
from ...checkpoints.fitting import Misfit, fit
from ...files import replacing, write_atomically
from ..plan.data import Data
from ..plan.errors import SettingsError
from ..plan.settings import Settings

WEIGHTS, ABOUT = "weights.safetensors", "weights.json"
FORMAT = "moco-plugins weights 1"
#: What the tensors' file says by itself, without the one beside it.
_TOLD = ("backbone", "channels", "image_size")


def read_weights(path: str | Path) -> Weights:
    """Read weights of any known format; a folder of ``pretrain`` stands for the weights in it.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or nobody can read it; see :func:`moco_plugins.checkpoints.load`.
    """
    file = Path(path).expanduser()
    if (file / "results.json").is_file() and not (file / WEIGHTS).is_file():
        raise SettingsError(
            f"{path}: there is no {WEIGHTS} in it: give a file, or let the pretraining there come to its end"
        )
    return load(file / WEIGHTS if (file / WEIGHTS).is_file() else file)


def start_from(backbone: nn.Module, path: str | Path, name: str) -> None:
    """Put the weights of a file into a backbone that was built as ``name``.

    Raises:
        SettingsError: they are of another network; says which backbone they fit.
    """
    weights = read_weights(path)
    try:
        state = fit(weights.backbone, backbone.state_dict(), "backbone")
    except Misfit as error:
        known = weights.architecture
        cure = (
            f". They are of {known.name}: --backbone {known.name}" if known is not None and known.name != name else ""
        )
        raise SettingsError(f"{path}: the weights do not fit backbone={name!r}: {error}{cure}") from error
    backbone.load_state_dict(state)


def start_notes(path: str | None) -> list[str]:
    """What of a file of first weights is left out: named, since a classifier that goes unsaid is missed later."""
    left = read_weights(path).left if path is not None else ()
    return [f"--init {path}: left out: {', '.join(left[:4])}{' ...' * (len(left) > 4)}"] if left else []


def write_weights(state: Mapping[str, Tensor], about: Mapping[str, Any], folder: Path) -> Path:
    """Write ``weights.safetensors``, and beside it ``weights.json``, which says what they are and how they were made."""
    from safetensors.torch import save

    about = {"format": FORMAT, **about}
    path = folder / WEIGHTS
    with replacing(path) as partial:
        tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        told = {name: str(about[name]) for name in _TOLD if isinstance(about.get(name), (str, int))}
        partial.write_bytes(save(tensors, metadata={"format": "pt", **told}))
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
        "import torch, torchvision",
        f"model = torchvision.models.{base}()",
        *stem,
        "model.fc = torch.nn.Identity()",
        f'model.load_state_dict(load_file("{WEIGHTS}"))',
    ]
