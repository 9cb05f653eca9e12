"""Fused attention kernels that also return the logsumexp, on one head: the engine of the fast InfoNCE."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_aten = torch.ops.aten

#: On CUDA one head and few queries occupy few multiprocessors; a queue is therefore cut into up to so many segments.
MAX_SEGMENTS = 64
MIN_SEGMENT_ROWS = 512
#: Keys whose mask is in memory at one time: 256 queries take 1.3 MiB.
MASK_ROWS = 1024


def available(query: Tensor) -> bool:
    """Whether a kernel runs for queries of this device, dtype and dimension."""
    dim = query.shape[1]
    if query.device.type == "cpu":
        floats = (torch.float32, torch.float64, *_HALF)
        return hasattr(_aten, "_scaled_dot_product_flash_attention_for_cpu") and query.dtype in floats
    if query.device.type == "cuda":
        # The efficient kernel loads rows of 16 bytes.
        return query.dtype in (torch.float32, *_HALF) and dim % (16 // query.element_size()) == 0
    return False


def attend(query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``softmax(q·k) k`` (N, D) and ``logsumexp(q·k)`` (N) of queries (N, D) over keys (K, D), K >= 1."""
    if query.device.type == "cpu":
        return _attend_cpu(query.contiguous(), keys.contiguous())
    return _attend_cuda(query.contiguous(), keys.contiguous())


def _attend_cpu(query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    q, k = query[None, None], keys[None, None]
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, scale=1.0)
    return out[0, 0], lse.reshape(-1)


def attend_apart(query: Tensor, keys: Tensor, query_ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Like :func:`attend`, but a query (N ids) meets no key (K ids) of its own id.

    Where no key is left the logsumexp is -inf and the mean has no meaning, but is finite. On the CPU the keys whose id is in
    the batch are kept out of the kernel by a bias of one row, (K), and met by themselves, under a mask. Elsewhere, where
    counting them would make the host wait, and in a compiled graph, all keys are met in blocks, under masks. Subtracting the
    few terms from the sum is as fast, but after training they are most of it, and float32 keeps nothing of the rest.
    """
    if query.device.type == "cpu" and not torch.compiler.is_compiling():
        ordered = query_ids.sort().values
        place = torch.searchsorted(ordered, key_ids, out_int32=True).clamp_(max=len(ordered) - 1)
        rows = (ordered[place] == key_ids).nonzero()[:, 0]
        if not len(rows):
            return attend(query, keys)
        if len(rows) < len(keys) // 2:
            bias = query.new_zeros(1, len(keys)).index_fill_(1, rows, _floor(query))
            mean, lse = _attend_biased(query, keys, bias)
            joined = mean.to(lse.dtype), lse
            for part in rows.split(MASK_ROWS):
                joined = join(joined, _attend_masked(query, keys[part], query_ids, key_ids[part]))
            return joined
    return _attend_masked(query, keys, query_ids, key_ids)


def _floor(query: Tensor) -> float:
    """Added to a logit it leaves nothing of it, and is finite: kernels differ in what they make of rows of -inf."""
    return -3e4 if query.dtype == torch.float16 else -1e30


def _attend_masked(query: Tensor, keys: Tensor, query_ids: Tensor, key_ids: Tensor) -> tuple[Tensor, Tensor]:
    floor, parts = _floor(query), []
    for start in range(0, keys.shape[0], MASK_ROWS):
        block = slice(start, start + MASK_ROWS)
        bias = (query_ids[:, None] == key_ids[None, block]).to(query.dtype).mul_(floor)  # N x block
        mean, lse = _attend_biased(query, keys[block], bias)
        parts.append((mean.to(lse.dtype), lse))
        if len(parts) == 2:
            parts = [join(*parts)]
    mean, lse = parts[0]
    return mean, torch.where(lse < floor / 2, -torch.inf, lse)


def _attend_biased(query: Tensor, keys: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    n = query.shape[0]
    q, k = query.contiguous()[None, None], keys.contiguous()[None, None]
    if query.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, attn_mask=bias[None, None], scale=1.0)
        return out[0, 0], lse.reshape(-1)
    short = -bias.shape[1] % 16  # the kernel loads the bias in rows of 16 bytes
    bias = torch.nn.functional.pad(bias, (0, short))[:, : bias.shape[1]]
    out, lse = _aten._scaled_dot_product_efficient_attention(q, k, k, bias[None, None], True, scale=1.0)[:2]
    return out[0, 0], lse[0, 0, :n]


def join(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Join the softmax-weighted mean (N, D) and logsumexp (N) of two sets of keys; exact."""
    (mean, lse), (mean_other, lse_other) = one, other
    total = torch.logaddexp(lse, lse_other)
    share = torch.exp(lse - total).nan_to_num(1.0)  # neither set has a key for this query
    return torch.lerp(mean_other, mean, share[:, None]), total


def segments(rows: int) -> int:
    """How many equal segments to cut ``rows`` keys into for CUDA: the largest power of two that leaves none short."""
    count = 1
    while count < MAX_SEGMENTS and rows % (2 * count) == 0 and rows // (2 * count) >= MIN_SEGMENT_ROWS:
        count *= 2
    return count


def _attend_cuda(query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    n, dim = query.shape
    count = segments(keys.shape[0])
    q = query[None, None].expand(count, 1, n, dim)  # S x 1 x N x D
    k = keys.view(count, 1, keys.shape[0] // count, dim)  # S x 1 x K/S x D
    if query.dtype in _HALF and dim <= 256 and torch.cuda.get_device_capability(query.device) >= (8, 0):
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, k, scale=1.0)[:2]
    else:
        out, lse = _aten._scaled_dot_product_efficient_attention(q, k, k, None, True, scale=1.0)[:2]
    return join_segments(out[:, 0], lse[:, 0, :n])  # the kernel pads the logsumexp to a multiple of 32


def join_segments(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Join the attention of S segments, (S, N, D) and (S, N), into (N, D) and (N); exact."""
    if out.shape[0] == 1:
        return out[0], lse[0]
    total = lse.logsumexp(0)  # N
    weights = torch.exp(lse - total)  # S x N
    return torch.einsum("sn,snd->nd", weights, out.to(lse.dtype)).to(out.dtype), total
