"""What is looked at once, before the first training step, and told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..steps import distributed
from . import batchnorm

if TYPE_CHECKING:
    from .moco import MoCo


def look(moco: MoCo, batch: int) -> None:
    """Refuse what cannot be right; warn, on the first rank, of what makes the training worth little.

    Args:
        moco: before its first training step.
        batch: N, the images of a forward pass.

    Raises:
        RuntimeError: on all ranks alike: FSDP of the first version, or DDP's ``join()`` where ranks exchange something.
    """
    _refuse(moco)
    for problem in _problems(moco, batch):
        distributed.warn_once_on_first_rank(problem)


def _refuse(moco: MoCo) -> None:
    if distributed.is_flattened(moco):
        raise RuntimeError(
            "FullyShardedDataParallel, version 1, flattens the weights, so that those of query and key encoder no longer "
            "pair; use torch.distributed.fsdp.fully_shard(moco), version 2, or DistributedDataParallel"
        )
    if (
        moco.settings.in_batch_negatives
        or moco.settings.shuffle_bn
        or (moco.queue is not None and moco.gather_distributed)
    ):
        distributed.refuse_join()


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
