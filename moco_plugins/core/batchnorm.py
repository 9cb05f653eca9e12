"""Keep BatchNorm from giving the answer away (He et al. 2020, arXiv:1911.05722, section 3.3, "shuffling BN").

Query and key of one image must not share batch statistics, or the encoder recognises the positive by them. Several
ranks exchange their key images. In one process a permutation changes nothing, so there BatchNorm is split: each group
of the (permuted) batch is normalised by itself, in every layer that calls ``torch.nn.functional.batch_norm``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ..steps.distributed import gather_rows, rank, world_size
from .nested import View, first, map_tensors, rows, take, tensors

#: Groups of one process, as in the authors' CIFAR-10 demonstration, where 8 of them stand for 8 GPUs.
BN_SPLITS = 8
#: Smaller groups have statistics too noisy to train with; two groups are made whatever their size.
MIN_GROUP = 16


def batch_norm_layers(module: nn.Module) -> dict[str, _BatchNorm]:
    """The layers of ``module`` that normalise by batch statistics, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}


def groups_for(batch: int, splits: int) -> int:
    """How many groups a batch is split into: at most ``splits``, of 16 images or more, but two if it can be."""
    if splits <= 1 or batch < 4:
        return 1
    return min(splits, max(2, batch // MIN_GROUP))


class SplitBatchNorm(TorchFunctionMode):
    """Within this context every batch norm in training treats the batch as ``groups`` batches of their own.

    Running statistics take the mean over the groups.
    """

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._split(*args, **kwargs)
        return func(*args, **kwargs)

    def _split(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training or self.groups == 1:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        chunks = input.tensor_split(self.groups)
        means = [running_mean.clone() for _ in chunks] if running_mean is not None else [None] * len(chunks)
        variances = [running_var.clone() for _ in chunks] if running_var is not None else [None] * len(chunks)
        out = [
            F.batch_norm(chunk, mean, variance, weight, bias, True, momentum, eps)
            for chunk, mean, variance in zip(chunks, means, variances, strict=True)
        ]
        if running_mean is not None and running_var is not None:
            running_mean.copy_(torch.stack(means).mean(0))  # type: ignore[arg-type]
            running_var.copy_(torch.stack(variances).mean(0))  # type: ignore[arg-type]
        return torch.cat(out)


def permutation(count: int, seed: int) -> Tensor:
    """A permutation that every rank computes alike, and that leaves the global random state alone."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def encode_apart(encoder: nn.Module, images: View, splits: int, seed: int) -> Tensor:
    """Encode key images so that their batch statistics are not their queries': exchanged, or split (N, ...)."""
    if not batch_norm_layers(encoder):
        keys: Tensor = encoder(images)
        return keys
    if world_size() > 1:
        return encode_shuffled(encoder, images, seed)
    return encode_split(encoder, images, groups_for(rows(images), splits), seed)


@torch.no_grad()
def encode_split(encoder: nn.Module, images: View, groups: int, seed: int) -> Tensor:
    """Encode a permuted batch with BatchNorm split into groups, and put the keys back in order."""
    order = permutation(rows(images), seed).to(first(images).device, non_blocking=True)
    with SplitBatchNorm(groups):
        keys = encoder(take(images, order))
    return torch.empty_like(keys).index_copy_(0, order, keys)


@torch.no_grad()
def encode_shuffled(encoder: nn.Module, images: View, seed: int) -> Tensor:
    """Encode a batch whose images are exchanged between the ranks, and bring the keys back to their queries."""
    gathered = [gather_rows(tensor) for _, tensor in tensors(images)]  # a list of ranks for each tensor
    counts = [part.shape[0] for part in gathered[0]]
    order = permutation(sum(counts), seed).to(first(images).device, non_blocking=True)
    start = sum(counts[: rank()])
    mine = slice(start, start + counts[rank()])
    exchanged = iter([torch.cat(parts)[order[mine]] for parts in gathered])
    keys = torch.cat(gather_rows(encoder(map_tensors(images, lambda _: next(exchanged)))))  # in the order of `order`
    return torch.empty_like(keys).index_copy_(0, order, keys)[mine]


def shuffles(encoder: nn.Module, splits: int, batch: int) -> str | None:
    """What goes wrong with BatchNorm in this setting, or None: the text of a warning."""
    layers = batch_norm_layers(encoder)
    if world_size() > 1:
        synced = [name for name, layer in layers.items() if isinstance(layer, nn.SyncBatchNorm)]
        if synced:
            return (
                f"shuffle_bn exchanges key images between ranks, but {synced[0]} ({len(synced)} such layers) is a "
                "SyncBatchNorm, whose statistics span all ranks: shuffling has no effect. Keep plain BatchNorm, or set "
                "shuffle_bn=False"
            )
    elif layers and groups_for(batch, splits) == 1:
        return (
            f"shuffle_bn is on and {next(iter(layers))} is a BatchNorm, but with bn_splits={splits} and {batch} images "
            "in one process nothing splits its statistics: query and key share them, and the encoder can recognise "
            "positives by them. Set bn_splits=2 or more and use batches of 4 or more"
        )
    return None
