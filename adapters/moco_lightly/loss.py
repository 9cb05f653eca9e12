"""MoCo's loss with its queue, in place of lightly's ``NTXentLoss(memory_bank_size=...)``."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from moco_plugins.core.queue_loss import QueueLoss


class MoCoLoss(QueueLoss):
    """InfoNCE against a queue of keys: ``loss = criterion(query, key)``, as lightly's ``NTXentLoss`` is called.

    :class:`moco_plugins.queue_loss.QueueLoss` with the arguments of ``NTXentLoss``: the keys of a training step enter the
    queue when the optimiser that owns the encoder of the query has really stepped, once per step.

    Args:
        temperature: T; 0.5, the default of ``NTXentLoss``. 0.07 in MoCo v1, 0.2 in v2.
        memory_bank_size: (K, D), number and dimension of the keys; 65536 keys of dimension 128 in the paper.
        gather_distributed: the queue takes the keys of all ranks and is the same on all of them. True, where
            ``NTXentLoss`` has False: with False each rank has a queue of its own, and only rank 0's is in a checkpoint.
        fill: "random" (as lightly's, and the paper's) or "empty", see :class:`moco_plugins.KeyQueue`.
        resize: what loading a queue of another size does: "error", or "keep_newest".

    Attributes:
        queue: :class:`moco_plugins.KeyQueue`.

    Raises:
        ValueError: T <= 0, or a bank size that is not (K, D) with K >= 1.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        memory_bank_size: Sequence[int] = (65536, 128),
        gather_distributed: bool = True,
        *,
        fill: str = "random",
        resize: str = "error",
    ) -> None:
        size, dim = _bank_size(memory_bank_size)
        super().__init__(size, dim, temperature, gather_distributed=gather_distributed, fill=fill, resize=resize)

    def resized(self, dim: int) -> str:
        """Say how to build this loss for keys of another dimension."""
        return f"memory_bank_size=({self.queue.size}, {dim})"


def _bank_size(size: Any) -> tuple[int, int]:
    if isinstance(size, numbers.Integral):
        if size == 0:
            raise ValueError(
                "memory_bank_size=0 means no queue, and MoCo's loss is one with a queue; for negatives of the batch alone "
                "use lightly.loss.NTXentLoss()"
            )
        raise ValueError(
            f"memory_bank_size={size} does not say how wide a key is; write memory_bank_size=({size}, dim)"
        )
    pair = tuple(size)
    if len(pair) != 2 or not all(isinstance(n, numbers.Integral) and int(n) >= 1 for n in pair):
        raise ValueError(f"memory_bank_size={size!r} must be (number of keys, their dimension), both at least 1")
    return int(pair[0]), int(pair[1])
