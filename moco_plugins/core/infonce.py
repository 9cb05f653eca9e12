"""InfoNCE: the contrastive loss of MoCo (He et al. 2020, arXiv:1911.05722, equation 1).

    L = mean_i( logsumexp([q_i·k_i, q_i·n_1, ..., q_i·n_K] / T) - q_i·k_i / T )

``sum_j softmax_j(q_i·n/T) n_j`` is attention with query q and key = value = the negatives, and a fused attention kernel
also keeps the logsumexp. So one call of it gives the loss and, because keys carry no gradient in MoCo, its whole
gradient, with no (N, K) matrix in memory:

    dL/dq_i = (sum_j p_ij n_j + p_i+ k_i - k_i) / (N T)          dL/dT = mean_i( q_i·k_i - q_i·sum_j p_ij n_j ) / T²

The plain formula stands beside it, for keys that carry a gradient and wherever no kernel runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import attention

IMPLEMENTATIONS = ("auto", "fused", "dense")
_HALF = (torch.float16, torch.bfloat16)


class ContrastiveLoss(Protocol):
    """What a loss plugged into MoCo looks like; :func:`info_nce` is one."""

    def __call__(
        self,
        query: Tensor,
        positive: Tensor,
        negatives: Tensor | Sequence[Tensor],
        temperature: float | Tensor,
        in_batch_negatives: bool = False,
    ) -> Tensor:
        """Return the loss, 0-dim."""


def info_nce(
    query: Tensor,
    positive: Tensor,
    negatives: Tensor | Sequence[Tensor],
    temperature: float | Tensor,
    in_batch_negatives: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """Return the InfoNCE loss of queries against their positives and a set of negatives, averaged over the batch.

    Rows are expected L2-normalised; they are used as they are. With nothing learned yet, the loss is near
    ln(number of negatives + 1).

    Args:
        query: (N, D), carries the gradient.
        positive: (N, D), the key of each query.
        negatives: (K, D), K >= 0, or several such tensors, which are joined exactly without being copied together.
        temperature: T > 0; 0.07 in MoCo v1 (section 3.3), 0.2 in v2 (Chen et al. 2020, arXiv:2003.04297, table 1).
            A 0-dim tensor may carry a gradient.
        in_batch_negatives: the other N - 1 positives are negatives as well. False, as in the paper.
        implementation: "fused" (attention kernel, no (N, K) matrix), "dense" (the plain formula), or "auto": fused
            where a kernel runs and positives and negatives carry no gradient, dense elsewhere.

    Raises:
        ValueError: shapes do not match, T <= 0, or "fused" is asked for where it cannot run.
    """
    banks = [negatives] if isinstance(negatives, Tensor) else list(negatives)
    _check(query, positive, banks, temperature, implementation)
    banks = [bank for bank in banks if bank.shape[0] > 0]
    with _full_precision(query.device.type):
        query, positive, banks = _common_dtype(query, positive, banks)
        temperature = _on_device(temperature, query)
        formula = (
            _FusedInfoNCE.apply if _use_fused(query, positive, banks, in_batch_negatives, implementation) else _dense
        )
        return formula(query, positive, temperature, in_batch_negatives, *banks)


def _dense(query: Tensor, positive: Tensor, temperature: Tensor, in_batch: bool, *banks: Tensor) -> Tensor:
    # The batch keys as one more bank hold each query's own positive too: it is then not added a second time.
    if in_batch:
        banks = (positive, *banks)
    kind = _accumulation_dtype(query)
    positive_logit = (query * positive).sum(1, dtype=kind) / temperature  # N
    logits = [(query @ bank.T).to(kind) / temperature for bank in banks]  # N x K each
    if not in_batch:
        logits.insert(0, positive_logit[:, None])
    return (torch.cat(logits, dim=1).logsumexp(1) - positive_logit).mean()


class _FusedInfoNCE(torch.autograd.Function):
    """Loss and gradient in the forward pass, by fused attention; the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, positive: Tensor, temperature: Tensor, in_batch: bool, *banks: Tensor
    ) -> Tensor:
        if in_batch:  # here and not by the caller: the compiler wants no tensor twice among the arguments
            banks = (positive, *banks)
        kind = temperature.dtype
        scaled = (query / temperature).to(query.dtype)  # N x D
        positive_logit = (query * positive).sum(1, dtype=kind) / temperature  # N
        parts = [attention.attend(scaled, bank) for bank in banks]  # (N x D, N) each
        lses = [lse for _, lse in parts]
        mixed = [out.to(kind) for out, _ in parts]
        if not in_batch:
            lses.append(positive_logit)
            mixed.append(positive.to(kind))
        lse, mean_key = _join(lses, mixed)
        n = query.shape[0]
        if query.requires_grad:
            ctx.grad_query = ((mean_key - positive) / (n * temperature)).to(query.dtype)
        if temperature.requires_grad:
            ctx.grad_temperature = (query * (positive - mean_key)).sum() / (n * temperature**2)
        return (lse - positive_logit).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if ctx.needs_input_grad[0]:
            grads[0] = ctx.grad_query * grad.to(ctx.grad_query.dtype)
        if ctx.needs_input_grad[2]:
            grads[2] = ctx.grad_temperature * grad
        return tuple(grads)


def _join(lses: list[Tensor], mixed: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Join the logsumexp (N) and softmax-weighted mean (N, D) of several sets of keys; exact."""
    if len(lses) == 1:
        return lses[0], mixed[0]
    lse = functools.reduce(torch.logaddexp, lses)
    mean = sum(
        (part * torch.exp(own - lse)[:, None] for own, part in zip(lses, mixed, strict=True)), start=lse.new_zeros(())
    )
    return lse, mean


def _use_fused(query: Tensor, positive: Tensor, banks: list[Tensor], in_batch: bool, implementation: str) -> bool:
    if implementation == "dense" or not (banks or in_batch):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (positive, *banks)):
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


def _common_dtype(query: Tensor, positive: Tensor, banks: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Compute in the widest dtype given: half-precision queries against a float32 queue are float32."""
    kind = functools.reduce(torch.promote_types, (t.dtype for t in (positive, *banks)), query.dtype)
    return query.to(kind), positive.to(kind), [bank.to(kind) for bank in banks]


def _on_device(temperature: float | Tensor, query: Tensor) -> Tensor:
    kind = _accumulation_dtype(query)
    if isinstance(temperature, Tensor):
        return temperature.to(query.device, kind)
    return torch.full((), temperature, dtype=kind, device=query.device)  # filled there: a copy would make the host wait


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in _HALF else tensor.dtype


def _full_precision(device_type: str) -> Any:
    """Switch autocast off: logits / 0.07 in half precision lose what tells keys apart."""
    return torch.autocast(device_type, enabled=False)


def _check(
    query: Tensor, positive: Tensor, banks: list[Tensor], temperature: float | Tensor, implementation: str
) -> None:
    # Shapes and Python numbers only: looking at values would make the host wait for the device.
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}")
    if query.ndim != 2 or query.shape[0] == 0:
        raise ValueError(
            f"query has shape {tuple(query.shape)}; it must be (N, D) with N >= 1: pool or flatten it first"
        )
    if positive.shape != query.shape:
        raise ValueError(
            f"positive has shape {tuple(positive.shape)} and query {tuple(query.shape)}; each query needs one key of "
            "its own dimension, in the same order"
        )
    for bank in banks:
        if bank.ndim != 2 or bank.shape[1] != query.shape[1]:
            raise ValueError(
                f"negatives has shape {tuple(bank.shape)}; it must be (K, {query.shape[1]}), one row a key "
                "(a queue stored as (D, K) must be transposed)"
            )
    for name, tensor in (("query", query), ("positive", positive), *(("negatives", bank) for bank in banks)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be a floating-point tensor")
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise ValueError(f"temperature={temperature} must be greater than 0 (0.07 in MoCo v1, 0.2 in v2)")
    if isinstance(temperature, Tensor) and temperature.ndim != 0:
        raise ValueError(f"temperature has shape {tuple(temperature.shape)}; it must be a number or a 0-dim tensor")
