"""The average of weights in half precision, which cannot hold it: kept in float32 beside them.

A step of the average is 1 - m = 0.001 of the way from the key's weight to the query's; bfloat16 resolves 0.004 of a weight,
so it would round the step off, and the key encoder would stand still. So the average is kept in float32, four bytes a
weight beside the two of the weight itself, and the weight is what it rounds to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_HALF = (torch.float16, torch.bfloat16)


class FloatAverage(nn.Module):
    """Float32 companions of the key encoder's half-precision tensors, by name; nothing where there are none.

    They are in the ``state_dict()``, so that a resumed training goes on bit for bit, and follow ``.to(device)``, but no
    cast. Whoever writes into the key encoder meanwhile is followed: then its companion starts anew from the tensor.

    Args:
        encoder: the key encoder.
        buffers: its buffers are averaged, too.
    """

    def __init__(self, encoder: nn.Module, buffers: bool = False) -> None:
        super().__init__()
        self._encoder, self._buffers_too = (encoder,), buffers  # in a tuple it is known, but no submodule
        self._tensors: dict[str, Tensor] = {}
        self._versions: dict[str, int] = {}

    def start(self) -> None:
        """Start anew from the key encoder."""
        self._tensors, self._versions = {}, {}
        for name, key in self._half():
            self._companion(name, key)

    def tensors(self) -> list[Tensor]:
        """The companions, in the order of the key encoder's tensors."""
        return [self._companion(name, key) for name, key in self._half()]

    def trust(self) -> None:
        """Take it that the companions belong to the key encoder as it is: both have been copied from one source."""
        self._versions = {}

    def move(
        self,
        pairs: Iterable[tuple[str, Tensor, Tensor]],
        momentum: float,
        rule: Callable[[Sequence[Tensor], Sequence[Tensor], float], None],
    ) -> None:
        """Let ``rule`` move key tensors towards query tensors, (name, query, key) each, by way of their companions."""
        pairs = list(pairs)
        half = [(name, key) for name, _, key in pairs if key.dtype in _HALF]
        keys = [self._companion(name, key) if key.dtype in _HALF else key for name, _, key in pairs]
        queries = [query.float() if key.dtype in _HALF else query for _, query, key in pairs]
        rule(keys, queries, momentum)
        for name, key in half:
            key.copy_(self._tensors[name])
            self._versions[name] = key._version

    def _half(self) -> list[tuple[str, Tensor]]:
        encoder = self._encoder[0]
        tensors = [*encoder.named_parameters(), *(encoder.named_buffers() if self._buffers_too else ())]
        return [(name, tensor) for name, tensor in tensors if tensor.dtype in _HALF]

    def _companion(self, name: str, key: Tensor) -> Tensor:
        known = self._tensors.get(name)
        # A copy of the module, or one that was moved, knows no versions yet: there the companion is trusted.
        if known is None or known.device != key.device or self._versions.get(name, key._version) != key._version:
            self._tensors[name] = known = key.detach().float()
        self._versions[name] = key._version
        return known

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FloatAverage:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tensors = {name: tensor.to(fn(tensor).device) for name, tensor in self._tensors.items()}
        self.trust()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, key in self._half():
            destination[prefix + name] = self._companion(name, key)

    @torch.no_grad()
    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # After the key encoder's own tensors. Companions that do not round to these belong to others, and a checkpoint of
        # weights in full precision, or of an earlier version, has none: then they start anew.
        self.start()
        for name, key in self._half():
            saved = state_dict.get(prefix + name)
            if saved is not None and saved.shape == key.shape:
                saved = saved.to(key.device, torch.float32)
                if torch.equal(saved.to(key.dtype), key):
                    self._tensors[name].copy_(saved)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_versions": {}}
