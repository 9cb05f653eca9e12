"""What lightly's methods share: the encoder, the checks, what the last step can tell, the step boundary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from moco_plugins.core import diagnostics
from moco_plugins.core.checks import local_crops
from moco_plugins.core.encoder import Encoder
from moco_plugins.steps import follow
from moco_plugins.steps.boundary import StepBoundary
from moco_plugins.steps.eager import eager

_HALF = (torch.float16, torch.bfloat16)


def full_precision(criterion: Callable[..., Tensor], *projections: Tensor, **arguments: Any) -> Tensor:
    """Compute a loss in float32 under autocast: exponentials of logits / 0.05 do not fit half precision."""
    with torch.autocast(projections[0].device.type, enabled=False):
        wide = [p.float() if p.dtype in _HALF else p for p in projections]
        return criterion(*wide, **arguments)


class LightlyMethod(nn.Module):
    """A backbone with a projection head, and the parts of :class:`moco_plugins.hooks.method.Method` that are always the same.

    Args:
        backbone: images -> (N, feature_dim).
        feature_dim: width of the backbone's features.
        projector: lightly's projection head.
    """

    def __init__(self, backbone: nn.Module, feature_dim: int, projector: nn.Module) -> None:
        super().__init__()
        self.encoder = Encoder(backbone, projector, feature_dim)
        self.feature_dim = feature_dim
        self.total_steps: int | None = None
        self._last: tuple[Tensor, Tensor] | None = None

    def embed(self, images: Tensor) -> Tensor:
        """Return the features of the backbone (N, feature_dim), without the head."""
        return self.encoder.features(images)

    def metrics(self) -> dict[str, float]:
        """Return loss, spread and effective rank of the last embeddings; empty before the first forward pass."""
        if self._last is None:
            return {}
        loss, embeddings = self._last
        unit = F.normalize(embeddings.float(), dim=1)
        metrics = {
            "loss": float(loss),
            "feature_std": float(unit.std(0, correction=0).mean()),
            "feature_std_reference": 1 / math.sqrt(unit.shape[1]),
            "effective_rank": diagnostics.effective_rank(unit),
        }
        diagnostics.warn_of_collapse(metrics)
        return metrics

    @eager
    def _remember(self, loss: Tensor, embeddings: Tensor) -> None:
        self._last = (loss.detach(), embeddings.detach())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}


class SteppedMethod(LightlyMethod):
    """A method with something to do once per optimiser step, in :meth:`on_step`; counts the steps.

    As in :class:`moco_plugins.MoCo`, nothing but BatchNorm statistics changes in a forward pass, so accumulation and
    skipped steps are right.
    """

    def __init__(self, backbone: nn.Module, feature_dim: int, projector: nn.Module) -> None:
        super().__init__(backbone, feature_dim, projector)
        self.boundary = StepBoundary()
        self._prepared = False
        follow.follow_optimizer_steps(self)

    @property
    def steps(self) -> int:
        """Optimiser steps so far."""
        return self.boundary.steps

    def on_step(self, staged: list[tuple[Tensor, ...]]) -> None:
        """Do what is due after an optimiser step; ``staged`` is what the forward passes since the last one left."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Do what is due before the first training step, and after loading."""

    def _begin(self) -> None:
        """Call at the start of each forward pass."""
        if self.training and not self._prepared:
            self.prepare()
            self._prepared = True

    @eager
    def _end(self, loss: Tensor, embeddings: Tensor, *staged: Tensor, limit: int = 1) -> None:
        """Call at the end of each forward pass, with what :meth:`on_step` needs of it: the ``limit`` newest rows."""
        self._remember(loss, embeddings)
        if self.training and loss.requires_grad:
            anchor = next((p for p in self.encoder.projector.parameters() if p.requires_grad), None)
            self.boundary.stage(staged or (loss[None],), loss, anchor, limit)

    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Commit the step of an optimiser that owns parameters of the encoder; called after each step."""
        if self.boundary.open and not follow.parameter_ids(optimizer).isdisjoint(map(id, self.encoder.parameters())):
            with torch.no_grad():
                self.on_step(self.boundary.take())

    # The count is a host number, so that schedules need no look at the device; in state_dict() it is a tensor.

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "steps"] = torch.tensor(self.steps)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        name = prefix + "steps"
        super()._load_from_state_dict({k: v for k, v in state_dict.items() if k != name}, prefix, *args)
        if name not in state_dict:
            args[2].append(name)  # missing_keys
        self.boundary.reset(int(state_dict.get(name, self.steps)))
        self._prepared = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        follow.follow_optimizer_steps(self)


def with_crops(views: Sequence[Tensor]) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """The two views, and the local crops after them, of methods with multi-crop; see :func:`pair`."""
    crops = local_crops(views)
    return pair(views[:2] if crops else views), crops


def pair(views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Check that ``views`` are two views of the same images.

    Raises:
        ValueError, TypeError: they are not.
    """
    if isinstance(views, Tensor) or len(views) != 2:
        what = f"one tensor of shape {tuple(views.shape)}" if isinstance(views, Tensor) else f"{len(views)} views"
        crops = (
            " (local crops, local_views=, are for MoCo, SwAV and DINO)"
            if not isinstance(views, Tensor) and len(views) > 2
            else ""
        )
        raise TypeError(f"views is {what}; the method takes two views of each image, [view_0, view_1]{crops}")
    first, second = views
    if first.shape[0] != second.shape[0]:
        raise ValueError(
            f"views have {first.shape[0]} and {second.shape[0]} images; row i of both must show the same image"
        )
    return first, second


def together(encoder: nn.Module, views: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Encode two views as one batch, so that they share BatchNorm statistics as in lightly's benchmarks."""
    first, second = encoder(torch.cat(pair(views))).chunk(2)
    return first, second


def call_frozen(module: nn.Module, part: str, inputs: Tensor) -> Tensor:
    """Call ``module`` with the parameters of its ``part`` ("" for all) held fixed.

    Their gradients are zero and not missing, because DDP waits for all gradients.
    """
    fixed = {
        name: parameter.detach() + 0 * parameter
        for name, parameter in module.named_parameters()
        if name.startswith(part) and parameter.requires_grad
    }
    output: Tensor = torch.func.functional_call(module, fixed, (inputs,))
    return output
