"""Two modules of one architecture, tensor by tensor: paired by name, made equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def pair_parameters(query: nn.Module, key: nn.Module) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
    """Pair the parameters of two encoders that can be averaged, by name: (name, query, key).

    Raises:
        ValueError: a name is in one of them only.
    """
    pairs = _pair(dict(query.named_parameters()), dict(key.named_parameters()), "parameters")
    return [pair for pair in pairs if pair[1].is_floating_point() or pair[1].is_complex()]


def pair_buffers(query: nn.Module, key: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    """Pair the buffers of two encoders by name: (name, query, key)."""
    return _pair(dict(query.named_buffers()), dict(key.named_buffers()), "buffers")


def _pair(queries: dict[str, Any], keys: dict[str, Any], what: str) -> list[tuple[str, Any, Any]]:
    if queries.keys() != keys.keys():
        missing, extra = sorted(queries.keys() - keys.keys()), sorted(keys.keys() - queries.keys())
        raise ValueError(
            f"key_encoder: its {what} differ from the query encoder's: missing {missing[:5]}, extra {extra[:5]}; "
            "both encoders must have the same architecture"
        )
    return [(name, tensor, keys[name]) for name, tensor in queries.items()]


@torch.no_grad()
def copy_module(query: nn.Module, key: nn.Module) -> None:
    """Make ``key`` equal to ``query``, parameters and buffers, in place.

    Raises:
        ValueError: a name or a shape is in one of them only.
    """
    parameters = _pair(dict(query.named_parameters()), dict(key.named_parameters()), "parameters")
    pairs = [*parameters, *pair_buffers(query, key)]
    for name, source, target in pairs:
        if source.shape != target.shape:
            raise ValueError(
                f"key_encoder: {name} has shape {tuple(target.shape)} and the query encoder's {tuple(source.shape)}; both "
                "encoders must have the same architecture"
            )
    for _, source, target in pairs:
        target.copy_(source)
