"""One primitive for contrastive losses: ``log sum_j exp(q_i·k_j / T)`` of queries over many keys, with its gradient.

``sum_j softmax_j(q_i·k/T) k_j`` is attention with query q and key = value = k, and a fused attention kernel also keeps the
logsumexp. So one call of it gives the value and, because keys carry no gradient in MoCo, the whole gradient, with no
(N, K) matrix in memory:

    d lse_i / dq_i = sum_j p_ij k_j / T          d lse_i / dT = -q_i·sum_j p_ij k_j / T²

The plain formula stands beside it, for keys that carry a gradient and wherever no kernel runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import attention

IMPLEMENTATIONS = ("auto", "fused", "dense")
_HALF = (torch.float16, torch.bfloat16)


@runtime_checkable
class RemoteKeys(Protocol):
    """Keys that are not here, or not all: who has them answers for them."""

    shape: tuple[int, int]
    dtype: torch.dtype

    def attend(self, query: Tensor, query_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mean (N, D) and logsumexp (N) of queries that are divided by T, as :func:`attention.attend`."""

    def matches(self, query_ids: Tensor) -> Tensor:
        """How many keys have the id of each query, (N)."""

    def sums(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Sum (N, D) and number (N) of the keys that have the label of each query."""


#: Keys (K, D), here or elsewhere.
Keys = Tensor | RemoteKeys


def logsumexp(
    query: Tensor,
    keys: Keys | Sequence[Keys],
    temperature: float | Tensor,
    query_ids: Tensor | None = None,
    key_ids: Tensor | Sequence[Tensor | None] | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Return ``log sum_j exp(q_i·k_j / T)``, (N); differentiable for the queries and the temperature.

    Args:
        query: (N, D).
        keys: (K, D), or several such sets, which are joined exactly without being copied together. -inf where there is none.
        temperature: T > 0; a 0-dim tensor may carry a gradient.
        query_ids: (N) whole numbers: a key with the id of the query is left out of its sum.
        key_ids: (K), one for each set of keys; None where a set has no ids.
        implementation: "fused" (attention kernel), "dense" (the plain formula), or "auto": fused where a kernel runs and
            the keys carry no gradient.

    Raises:
        ValueError: "fused" is asked for where it cannot run.
    """
    sets: list[Any] = list(keys) if isinstance(keys, (list, tuple)) else [keys]
    numbers: list[Any] = list(key_ids) if isinstance(key_ids, (list, tuple)) else [key_ids] * len(sets)
    pairs = [(rows, ids) for rows, ids in zip(sets, numbers, strict=True) if rows.shape[0]]
    temperature = on_device(temperature, query)
    if use_fused(query, [rows for rows, _ in pairs], implementation):
        return _Fused.apply(query, temperature, query_ids, pairs)
    kind = accumulation_dtype(query)
    logits = [query.new_full((query.shape[0], 1), -torch.inf, dtype=kind)]
    for rows, ids in pairs:
        part = (query @ rows.T).to(kind) / temperature  # N x K
        if query_ids is not None and ids is not None:
            part = part.masked_fill(query_ids[:, None] == ids[None], -torch.inf)
        logits.append(part)
    return torch.cat(logits, dim=1).logsumexp(1)


class _Fused(torch.autograd.Function):
    """The mean is kept in the forward pass; the backward pass only scales it."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, temperature: Tensor, query_ids: Tensor | None, pairs: Any) -> Tensor:
        kind = temperature.dtype
        scaled = (query / temperature).to(query.dtype)  # N x D
        parts = [_attend(scaled, rows, query_ids, ids) for rows, ids in pairs]
        mean, lse = functools.reduce(attention.join, [(mean.to(kind), lse) for mean, lse in parts])
        if query.requires_grad:
            ctx.grad_query = mean / temperature
        if temperature.requires_grad:
            ctx.grad_temperature = -(query * mean).sum(1) / temperature**2
        ctx.kind = query.dtype
        return lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if ctx.needs_input_grad[0]:
            grads[0] = (ctx.grad_query * grad[:, None]).to(ctx.kind)
        if ctx.needs_input_grad[1]:
            grads[1] = (ctx.grad_temperature * grad).sum()
        return tuple(grads)


def _attend(scaled: Tensor, rows: Any, query_ids: Tensor | None, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    if not isinstance(rows, Tensor):
        return rows.attend(scaled, query_ids)
    if query_ids is None or ids is None:
        return attention.attend(scaled, rows)
    return attention.attend_apart(scaled, rows, query_ids, ids)


@torch.no_grad()
def softmax_mean(query: Tensor, keys: Keys | Sequence[Keys], temperature: float | Tensor, **ids: Any) -> Tensor:
    """Return ``sum_j softmax_j(q_i·k/T) k_j``, (N, D), of float queries: the mean that soft targets ask for. No gradient.

    It is T times the gradient of :func:`logsumexp`, and takes its arguments.
    """
    with torch.enable_grad():
        leaf = query.detach().requires_grad_()
        total = logsumexp(leaf, keys, temperature, **ids).sum()
        (gradient,) = torch.autograd.grad(total, leaf)
    return gradient * temperature


def use_fused(query: Tensor, keys: Sequence[Keys], implementation: str) -> bool:
    """Whether the kernel is to be used; remote keys have no other way."""
    if any(not isinstance(rows, Tensor) for rows in keys):
        return True
    if implementation == "dense" or not keys:
        return False
    if torch.is_grad_enabled() and any(rows.requires_grad for rows in keys if isinstance(rows, Tensor)):
        if implementation == "fused":
            raise ValueError(
                "implementation='fused' has no gradient for positive or negatives, and one of them requires it; "
                "detach them, or use implementation='dense'"
            )
        return False
    available = attention.available(query)
    if implementation == "fused" and not available:
        raise ValueError(
            f"implementation='fused': no fused attention kernel for device {query.device.type!r}, dtype {query.dtype}, "
            f"dimension {query.shape[1]}; use 'auto' or 'dense'"
        )
    return available


def on_device(temperature: float | Tensor, query: Tensor) -> Tensor:
    """The temperature as a tensor beside the queries, in the dtype that sums are in."""
    kind = accumulation_dtype(query)
    if isinstance(temperature, Tensor):
        return temperature.to(query.device, kind)
    return torch.full((), temperature, dtype=kind, device=query.device)  # filled there: a copy would make the host wait


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    """float32 for half precision."""
    return torch.float32 if tensor.dtype in _HALF else tensor.dtype
