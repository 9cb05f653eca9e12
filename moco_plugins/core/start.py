"""What is looked at once, before the first training step, and told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..steps import distributed
from . import batchnorm

if TYPE_CHECKING:
    from .moco import MoCo


def advise(moco: MoCo, batch: int) -> None:
    """Warn, on the first rank, of what makes the training worth little; ``batch`` is the number of images of a step."""
    for problem in _problems(moco, batch):
        distributed.warn_once_on_first_rank(problem)


def _problems(moco: MoCo, batch: int) -> Iterator[str]:
    if moco.settings.shuffle_bn:
        unshuffled = batchnorm.shuffles(moco.key_encoder, moco.bn_splits, batch)
        if unshuffled:
            yield unshuffled
    backbone = moco.query_encoder.backbone
    parameters = list(backbone.parameters())
    if parameters and not any(p.requires_grad for p in parameters):
        yield (
            f"no parameter of the backbone ({type(backbone).__name__}) has requires_grad: it does not change, and the head "
            "alone is trained. backbone.requires_grad_(True) trains it"
        )
