"""What any self-supervised method must offer; every engine and the harness run whatever offers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Method(Protocol):
    """A ``torch.nn.Module`` that learns from two views of each image.

    Everything that must survive a restart is in its ``state_dict()``. What has to happen once per optimiser step
    (a momentum update, a queue) it does by itself: see :func:`moco_plugins.steps.follow.follow_optimizer_steps`.
    """

    #: Width of :meth:`embed`'s output.
    feature_dim: int
    #: Optimiser steps of the whole training, for schedules; None while unknown. Engines set it before the first step.
    total_steps: int | None

    def __call__(self, views: Sequence[Tensor]) -> Tensor:
        """Return the loss (0-dim) of a pair of views, each (N, C, H, W); in eval mode without changing anything."""

    def embed(self, images: Tensor) -> Tensor:
        """Return the backbone's features (N, feature_dim), without the projection head."""

    # A method whose ``embed`` uses another backbone than the one it was given, a teacher's, has it as ``embedding_backbone``.

    # A method that learns from more than views has ``asks_for``, names among "labels" and "ids" (the numbers of the images);
    # it is then called as ``method(views, labels=labels, ids=ids)`` with those, each (N,), -1 where unknown.

    def metrics(self) -> dict[str, float]:
        """Return what the last forward pass can tell, computed when asked."""


def asked_of(method: object, labels: Any = None, ids: Any = None) -> dict[str, Any]:
    """What a method asks for of a batch's labels and ids, as keyword arguments for its call."""
    given = {"labels": labels, "ids": ids}
    return {name: given[name] for name in getattr(method, "asks_for", ())}
