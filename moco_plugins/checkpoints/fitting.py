"""Tensors of a checkpoint under the names of the module they are for, or an error that says what differs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .heads import in_sequence
from .names import translate_like

if TYPE_CHECKING:
    from ..core.moco import MoCo
    from .weights import Weights

_POSITIONS = ("pos_embed", "encoder.pos_embedding", "embeddings.position_embeddings")


class Misfit(ValueError):
    """Weights that do not fit a module; the message says what differs."""


def fit(
    state: Mapping[str, Tensor], own: Mapping[str, Tensor], part: str, interpolate: bool = False
) -> dict[str, Tensor]:
    """Return the backbone ``state`` under the names of ``own``, a module's state dict.

    Raises:
        Misfit: names or shapes differ.
    """
    fitted = dict(state) if state.keys() == own.keys() else translate_like(state, own)
    if interpolate:
        for name, value in fitted.items():
            if name.endswith(_POSITIONS) and name in own and value.shape != own[name].shape:
                fitted[name] = resized_positions(value, own[name].shape[1])
    problems = differences(fitted, own, f"{part}.")
    if problems:
        raise Misfit("; ".join(problems))
    return fitted


def differences(state: Mapping[str, Tensor], own: Mapping[str, Tensor], prefix: str) -> list[str]:
    """What keeps ``state`` from loading into a module with the state dict ``own``."""
    problems = []
    for name in (name for name in own if name in state and state[name].shape != own[name].shape):
        there, here = tuple(state[name].shape), tuple(own[name].shape)
        problems.append(f"{prefix}{name} is {there} there and {here} here{_why(name, there, here)}")
    absent = [name for name in own if name not in state and not name.endswith("num_batches_tracked")]
    extra = [name for name in state if name not in own]
    if absent:
        problems.append(f"{', '.join(prefix + name for name in absent[:3])} ({len(absent)} in all) are not there")
    if extra:
        problems.append(
            f"{', '.join(prefix + name for name in extra[:3])} ({len(extra)} in all) are there and not here"
        )
    return problems[:5]


def _why(name: str, there: tuple[int, ...], here: tuple[int, ...]) -> str:
    if name.endswith(_POSITIONS):
        return " (position embeddings of another image size: interpolate=True resizes them)"
    if len(there) == 4 == len(here) and there[1] != here[1] and there[0] == here[0] and min(there[1], here[1]) <= 4:
        return f" (it takes images of {there[1]} channels)"
    if len(there) == 4 == len(here) and there[:2] == here[:2] and there[1] <= 4:
        return " (another stem: that of small images, such as resnet18-cifar, has 3 x 3)"
    return ""


def resized_positions(embeddings: Tensor, tokens: int) -> Tensor:
    """Resize position embeddings (1, 1 + h w, D) of a square grid to ``tokens``, bicubic; the class token's stays."""
    own, grid = embeddings[:, :1], embeddings[:, 1:]
    old, new = math.isqrt(grid.shape[1]), math.isqrt(tokens - 1)
    if old * old != grid.shape[1] or new * new != tokens - 1:
        raise Misfit(f"position embeddings of {grid.shape[1]} and {tokens - 1} places are not both of a square")
    square = grid.reshape(1, old, old, -1).permute(0, 3, 1, 2).float()
    square = nn.functional.interpolate(square, (new, new), mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([own, square.permute(0, 2, 3, 1).reshape(1, new * new, -1).to(grid.dtype)], 1)


def fit_head(state: Mapping[str, Tensor], own: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    """Return a head's tensors, in sequence, under the names of ``own``.

    Raises:
        Misfit: it is another kind of head.
    """
    places = in_sequence(own)
    if state.keys() != own.keys() and places is not None:
        state = {places.get(name, name): value for name, value in state.items()}
    problems = differences(state, own, f"{part}.")
    if problems:
        raise Misfit("; ".join(problems))
    return dict(state)


def load_into(weights: Weights, moco: MoCo, interpolate: bool) -> tuple[str, ...]:
    """See :meth:`moco_plugins.checkpoints.Weights.load_into`."""
    left = list(weights.left)
    loads: list[tuple[nn.Module, dict[str, Tensor]]] = []
    problems: list[str] = []

    def put(state: dict[str, Tensor], module: nn.Module | None, part: str, head: bool) -> None:
        if not state:
            return
        if module is None:
            left.extend(f"{part}.{name}" for name in state)
            return
        own = module.state_dict()
        try:
            loads.append((module, fit_head(state, own, part) if head else fit(state, own, part, interpolate)))
        except Misfit as error:
            problems.append(str(error))

    query, key = moco.query_encoder, moco.key_encoder
    put(weights.backbone, query.backbone, "query_encoder.backbone", False)
    put(weights.projector, query.projector, "query_encoder.projector", True)
    put(weights.predictor, moco.predictor, "predictor", True)
    put(weights.key_backbone, key.backbone, "key_encoder.backbone", False)
    put(weights.key_projector, key.projector, "key_encoder.projector", True)
    queue = _queue_state(weights, moco, problems, left)
    if problems:
        raise ValueError(
            f"{weights.format} weights: they do not fit this MoCo: "
            + "; ".join(problems[:5])
            + ". Build MoCo with the "
            "checkpoint's backbone, variant, projection_dim, hidden_dim and queue_size"
        )
    for module, state in loads:
        module.load_state_dict(state, strict=False)  # all but num_batches_tracked, which old files have not, are there
    if queue is not None:
        moco.queue.load_state_dict(queue)
    trained = bool(weights.key_backbone) and (bool(weights.key_projector) or not weights.projector)
    if not trained:
        key.load_state_dict(query.state_dict())
    moco.boundary.reset(int(trained) if weights.steps is None else weights.steps)
    moco.prepared, moco.monitor.last = False, None
    return tuple(left)


def _queue_state(weights: Weights, moco: MoCo, problems: list[str], left: list[str]) -> dict[str, Tensor] | None:
    if weights.queue is None:
        return None
    if moco.queue is None:
        left.append("queue")
        return None
    there, here = tuple(weights.queue.shape), (moco.queue.size, moco.queue.dim)
    if there[1] != here[1] or (there != here and getattr(moco.queue, "resize", "error") == "error"):
        problems.append(
            f"queue.keys is {there} there and {here} here (queue_size={there[0]}, or queue_resize='keep_newest')"
        )
        return None
    filled = there[0] if weights.queue_filled is None else weights.queue_filled
    return {
        **moco.queue.state_dict(),
        "keys": weights.queue,
        "ptr": torch.tensor(weights.queue_ptr),
        "filled": torch.tensor(filled),
    }
