"""facebookresearch/detectron2: a pickle of numpy arrays under the names of its ResNet, for R-50 C4 and FPN alike.

The names are those of the MoCo authors' ``convert-pretrain-to-detectron2.py``.
"""

from __future__ import annotations

import pickle
from pathlib import Path

from .dialects import Dialect
from .formats import Format
from .names import in_dialect
from .reading import Content
from .weights import Weights

RESNET = Dialect(
    "detectron2",
    "resnet",
    (
        ("conv1.*", "stem.conv1.*"),
        ("bn1.*", "stem.conv1.norm.*"),
        ("layer{i}.{j}.conv{k}.*", "res{i+1}.{j}.conv{k}.*"),
        ("layer{i}.{j}.bn{k}.*", "res{i+1}.{j}.conv{k}.norm.*"),
        ("layer{i}.{j}.downsample.0.*", "res{i+1}.{j}.shortcut.*"),
        ("layer{i}.{j}.downsample.1.*", "res{i+1}.{j}.shortcut.norm.*"),
    ),
)


def read(content: Content) -> Weights | None:
    """A ResNet of detectron2's model zoo in its own names, or one that was converted from MoCo."""
    if content.kind != "pickle" or not content.has("stem.conv1.", "res2."):
        return None
    classifier = tuple(name for name in content.state if name.startswith("stem.fc."))
    state = {name: value for name, value in content.take("").items() if name not in classifier}
    return Weights("", state, left=classifier)


def write(weights: Weights, path: Path, part: str) -> None:
    """Write a pickle that ``MODEL.WEIGHTS`` takes, with STRIDE_IN_1X1 False, PIXEL_STD of ImageNet and FORMAT RGB."""
    state = in_dialect(weights.backbone, RESNET)
    if state["stem.conv1.weight"].shape[-1] != 7:
        raise ValueError(
            "detectron2's ResNet has a stem of 7 x 7 with pooling; that of small images has no place in it"
        )
    arrays = {
        name: value.detach().cpu().numpy() for name, value in state.items() if not name.endswith("num_batches_tracked")
    }
    with path.open("wb") as file:
        pickle.dump({"model": arrays, "__author__": "MOCO", "matching_heuristics": True}, file)


FORMATS = {"detectron2": Format("detectron2's ResNets", read, write=write, dialects=(RESNET,))}
