"""Read the checkpoints of other MoCo code: the authors' (v1, v2, v3) and OpenMMLab's.

They differ in names and in the queue's layout, (D, K) there and (K, D) here; the weights are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from ..core.moco import MoCo

#: (pattern of a name there, name here): the first that matches is taken. encoder_q/k: the authors' v1 and v2;
#: base/momentum_encoder: their v3; backbone, neck and encoder_k.module: OpenMMLab's.
_RULES = [
    (r"encoder_([qk])\.(?:fc|head)\.(weight|bias)$", r"{\1}.projector.0.\2"),
    (r"encoder_([qk])\.(?:fc|head)\.(\d+\..*)$", r"{\1}.projector.\2"),
    (r"encoder_k\.module\.0\.(.*)$", r"{k}.backbone.\1"),
    (r"encoder_k\.module\.1\.(?:mlp\.|fc\.)?(\d+\..*)$", r"{k}.projector.\1"),
    (r"encoder_k\.module\.1\.fc\.(weight|bias)$", r"{k}.projector.0.\1"),
    (r"encoder_([qk])\.((?!steps$).*)$", r"{\1}.backbone.\2"),
    (r"(base|momentum)_encoder\.(?:fc|head)\.(\d+\..*)$", r"{\1}.projector.\2"),
    (r"(base|momentum)_encoder\.(.*)$", r"{\1}.backbone.\2"),
    (r"backbone\.(.*)$", r"{q}.backbone.\1"),
    (r"neck\.(?:mlp\.)?(\d+\..*)$", r"{q}.projector.\1"),
    (r"neck\.fc\.(weight|bias)$", r"{q}.projector.0.\1"),
    (r"(predictor\..*)$", r"\1"),
]
_ENCODERS = {"{q}": "query_encoder", "{k}": "key_encoder", "{base}": "query_encoder", "{momentum}": "key_encoder"}


def load_foreign_checkpoint(moco: MoCo, checkpoint: str | PathLike[str] | Mapping[str, Any]) -> list[str]:
    """Load a checkpoint of other MoCo code into ``moco``: both encoders, and the queue where it has one.

    The optimiser's state is not taken over. Returns the names in the checkpoint that have no place here.

    Args:
        moco: built with the same backbone, variant, projection_dim and queue size.
        checkpoint: a path (read with ``weights_only=True``), or what was read from one.

    Raises:
        ValueError: the checkpoint is of no known format, or does not fit; the message says what differs.
    """
    read: Mapping[str, Any] = (
        checkpoint if isinstance(checkpoint, Mapping) else torch.load(checkpoint, map_location="cpu", weights_only=True)
    )
    state, left = translate(read)
    own = moco.state_dict()
    if not any(name.startswith("query_encoder.") for name in state):
        raise ValueError(
            f"checkpoint: none of its names is of a known MoCo format, such as {list(read)[:3]}; known are "
            "facebookresearch/moco and moco-v3, mmselfsup and mmpretrain"
        )
    problems = [
        f"{name} is {tuple(value.shape)} there and {tuple(own[name].shape)} here"
        for name, value in state.items()
        if name in own and value.shape != own[name].shape
    ]
    absent = [name for name in own if name.startswith("query_encoder.") and name not in state]
    if absent:
        problems.append(f"{', '.join(absent[:3])} ({len(absent)} in all) are not there")
    if problems:
        raise ValueError(
            "checkpoint: it does not fit this MoCo: " + "; ".join(problems[:5]) + ". Build MoCo with the checkpoint's "
            "backbone, variant, projection_dim and queue_size"
        )
    moco.load_state_dict({**own, **{name: value for name, value in state.items() if name in own}})
    return left + [name for name in state if name not in own]


def translate(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the checkpoint's tensors under this project's names, and the names that have none."""
    weights: Mapping[str, Any] = checkpoint.get("state_dict", checkpoint.get("model", checkpoint))
    state: dict[str, Tensor] = {}
    left = []
    for full, value in weights.items():
        name = full.removeprefix("module.")
        if name == "queue":
            state["queue.keys"] = value.T.contiguous()
            state["queue.filled"] = torch.tensor(value.shape[1])
        elif name == "queue_ptr":
            state["queue.ptr"] = value.reshape(()).long()
        elif (ours := _rename(name)) is not None:
            state[ours] = value
        else:
            left.append(full)
    if any(name.startswith("key_encoder.") for name in state):
        state["steps"] = torch.tensor(1)  # has trained: the key encoder is its own, not a copy to be made
    return state, left


def _rename(name: str) -> str | None:
    for pattern, replacement in _RULES:
        if re.match(pattern, name):
            renamed = re.sub(pattern, replacement, name)
            for token, encoder in _ENCODERS.items():
                renamed = renamed.replace(token, encoder)
            return renamed
    return None
