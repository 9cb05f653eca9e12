"""Which images are learnt from, which are held out."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from .arrays import ImageArray
from .grouping import copied, copies, grouped_split


def to_learn_from(train: Any) -> Any:
    """The images that a method learns from: the training set, or where it has one the larger set without labels."""
    more = getattr(train, "pretrain", None)
    return train if more is None else more


def stratified_split(labels: Tensor | None, count: int, held_out: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Split ``range(count)`` into (kept, held out), the same fraction of each class; fixed by ``seed``.

    Without labels, or where images have several, it is a plain random split. At least one item of each class with two or
    more is held out.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out={held_out} must lie between 0 and 1")
    generator = torch.Generator().manual_seed(seed)
    whole = labels is None or labels.ndim == 2
    groups = [torch.arange(count)] if whole else [(labels == c).nonzero()[:, 0] for c in torch.unique(labels)]
    kept, held = [], []
    for group in groups:
        shuffled = group[torch.randperm(len(group), generator=generator)]
        cut = min(max(1, round(held_out * len(group))), len(group) - 1)
        held.append(shuffled[:cut])
        kept.append(shuffled[cut:])
    return torch.cat(kept).sort().values, torch.cat(held).sort().values


def cut(images: Any, labels: Tensor | None, held_out: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split ``range(len(images))`` as :func:`stratified_split`; what is together in ``images.groups`` stays together."""
    groups = getattr(images, "groups", None)
    if groups is None or not copied(groups):
        return stratified_split(labels, len(images), held_out, seed)
    return grouped_split(labels, groups, held_out, seed)


def train_test(whole: Any, seed: int = 0) -> tuple[Any, Any]:
    """Cut a set with ``labels`` and ``subset(indices)`` into (train, test), four fifths to one fifth of each class.

    What is together in ``whole.groups`` (N,), where that is not None, stays together; equal images of an
    :class:`ImageArray` always do. The training set remembers the ``whole``, so that the harness can cut it anew for each
    seed, and takes its ``unlabeled`` images along, without copies of what is held out.
    """
    if isinstance(whole, ImageArray) and whole.groups is None:
        whole.groups = copies(whole.images)
        again = copied(whole.groups)
        if again:
            warnings.warn(
                f"{again} of {len(whole)} images are exact copies of others; copies stay on one side of the cut."
            )
    kept, held_out = cut(whole, whole.labels, 0.2, seed)
    train, test = whole.subset(kept), whole.subset(held_out)
    train.whole = whole
    if getattr(whole, "unlabeled", None) is not None:
        train.unlabeled = _not_held_out(whole.unlabeled, test.groups)
    return train, test


def _not_held_out(more: Any, held: Tensor | None) -> Any:
    """The images of no group, or of one that is not held out."""
    if held is None or more.groups is None or not bool(torch.isin(more.groups, held).any()):
        return more
    return more.subset((~torch.isin(more.groups, held)).nonzero()[:, 0])
