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


#: What wrappers put into the names of a module's tensors: torch.compile, DDP and the like, FSDP, checkpointing.
_WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def _pair(queries: dict[str, Any], keys: dict[str, Any], what: str) -> list[tuple[str, Any, Any]]:
    if queries.keys() != keys.keys():
        queries, keys = _unwrapped(queries), _unwrapped(keys)
    if queries.keys() != keys.keys():
        missing, extra = sorted(queries.keys() - keys.keys()), sorted(keys.keys() - queries.keys())
        raise ValueError(
            f"key_encoder: its {what} differ from the query encoder's: missing {missing[:5]}, extra {extra[:5]}; "
            f"both encoders must have the same architecture{_CURE if _changed(missing, extra) else ''}"
        )
    return [(name, tensor, keys[name]) for name, tensor in queries.items()]


_CURE = (
    ". Parametrise layers and add adapters (LoRA) before MoCo is built around the backbone, so that the key encoder has "
    "them too"
)


def _changed(missing: list[str], extra: list[str]) -> bool:
    """Whether it looks as if one encoder had been parametrised, or had got adapters, after MoCo was built."""
    return any("parametrizations" in name or "lora" in name.lower() for name in (*missing, *extra))


def _unwrapped(tensors: dict[str, Any]) -> dict[str, Any]:
    """The same tensors by the names they have without wrappers."""
    plain = {".".join(part for part in name.split(".") if part not in _WRAPPERS): t for name, t in tensors.items()}
    return plain if len(plain) == len(tensors) else tensors


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
