"""The queue of keys: MoCo's dictionary of negatives (He et al. 2020, arXiv:1911.05722, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checks import whole_number

_STATE = ("keys", "ptr", "filled", "skipped")
_HALF = (torch.float16, torch.bfloat16)


class KeyQueue(nn.Module):
    """The last K keys, first in, first out, in a ring: any batch size, any pointer.

    After any sequence of :meth:`enqueue` the queue holds exactly the newest min(n, K) of the n finite keys it was given.
    Keys are L2-normalised on entry; rows with a NaN or infinite entry do not enter and are counted in ``skipped``.
    Nothing waits for the device, except :meth:`negatives` with ``fill="empty"`` while the queue is not full.

    The tensors live in the ``state_dict()`` and follow ``.to()``, but are kept out of ``named_buffers()``: DDP would
    otherwise broadcast the whole queue before every forward pass, and FSDP would cast it. They are only written in place.

    Args:
        size: K, number of keys; 65536 in the paper.
        dim: D, dimension of a key; 128 in the paper.
        fill: what stands in the queue at first. "random" (as in the paper): random unit vectors, which are used as
            negatives until real keys replace them. "empty": only real keys are negatives.
        resize: what loading a queue of another size does. "error", or "keep_newest": the newest keys that fit.
        columns: what is remembered beside each key: name -> dtype, ``{"label": torch.long, "id": torch.long}`` (or "long").
            Rows that nobody told anything of hold -1, NaN or False.

    Attributes:
        columns: name -> (K) tensor, moved, saved, gathered and resumed with the keys.
        keys: (K, D), float32 or float64 (a module cast to half precision keeps a float32 queue).
        ptr: 0-dim int64, the row that is written next.
        filled: 0-dim int64, how many rows are real keys.
        skipped: 0-dim int64, how many non-finite keys were turned away.

    Raises:
        ValueError: K < 1, D < 1, or an unknown ``fill`` or ``resize``.
    """

    keys: Tensor
    ptr: Tensor
    filled: Tensor
    skipped: Tensor

    def __init__(
        self,
        size: int,
        dim: int,
        fill: str = "random",
        resize: str = "error",
        columns: Mapping[str, torch.dtype | str] | None = None,
    ) -> None:
        super().__init__()
        size, dim = whole_number("size", size), whole_number("dim", dim)
        if fill not in ("random", "empty"):
            raise ValueError(f"fill={fill!r} must be 'random' or 'empty'")
        if resize not in ("error", "keep_newest"):
            raise ValueError(f"resize={resize!r} must be 'error' or 'keep_newest'")
        self.size, self.dim, self.fill, self.resize = size, dim, fill, resize
        keys = F.normalize(torch.randn(size, dim), dim=1) if fill == "random" else torch.zeros(size, dim)
        self.keys = keys.to(torch.float32) if keys.dtype in _HALF else keys
        for name in _STATE[1:]:
            setattr(self, name, torch.zeros((), dtype=torch.long))
        self.columns: dict[str, Tensor] = {name: _column(name, kind, size) for name, kind in (columns or {}).items()}
        self._full = fill == "random"  # host copy of "every row is a negative"

    def negatives(self) -> Tensor:
        """Return the rows to contrast with, (n, D): all K, or with ``fill="empty"`` only the real ones. No copy."""
        if self._full:
            return self.keys
        filled = int(self.filled)
        self._full = filled == self.size
        return self.keys[:filled]

    @torch.no_grad()
    def enqueue(self, keys: Tensor, columns: Mapping[str, Tensor] | None = None) -> None:
        """Put keys (N, D) into the queue in order, each in place of the oldest one, with what is known of them (N).

        Raises:
            ValueError: ``keys`` is not (N, D), or a column is not (N) or none of this queue.
        """
        if keys.ndim != 2 or keys.shape[1] != self.dim:
            raise ValueError(f"keys has shape {tuple(keys.shape)}; this queue takes (N, {self.dim}), one row a key")
        n = keys.shape[0]
        known = self._check_columns(columns or {}, n)
        if n == 0:
            return
        rows = _unit(keys.detach().to(self.keys.device, self.keys.dtype))  # N x D
        finite = torch.isfinite(rows).all(1)  # N
        count = finite.sum()
        # Finite rows move to the end, in order. The rows before them are turned away: each lands on a row that stays as
        # it is. All targets are distinct, so this is deterministic, and no count has to travel to the host.
        rank = torch.where(finite, finite.cumsum(0) - 1 + (n - count), (~finite).cumsum(0) - 1)  # N
        order = torch.empty_like(rank).scatter_(0, rank, torch.arange(n, device=rank.device))
        newest = order[max(0, n - self.size) :]  # M = min(N, K)
        offset = torch.arange(n - newest.shape[0], n, device=rank.device) - n + count
        target = (self.ptr + offset) % self.size  # M
        self._write(target, newest, finite[newest], {"keys": rows, **known})
        self.ptr.add_(count).remainder_(self.size)
        self.filled.add_(count).clamp_(max=self.size)
        self.skipped.add_(n - count)

    def _write(self, target: Tensor, newest: Tensor, finite: Tensor, values: Mapping[str, Tensor]) -> None:
        """Put row newest[i] of the values into row target[i] of the queue, where it is finite."""
        for name, value in values.items():
            own = self.columns.get(name, self.keys) if name != "keys" else self.keys
            good = finite[:, None] if name == "keys" else finite
            own.index_copy_(0, target, torch.where(good, value[newest], own[target]))

    def _check_columns(self, columns: Mapping[str, Tensor], n: int) -> dict[str, Tensor]:
        unknown = sorted(columns.keys() - self.columns.keys())
        if unknown:
            raise ValueError(
                f"columns has {unknown[0]!r}, which this queue does not remember: build it with "
                f"columns={{{unknown[0]!r}: torch.long}}"
            )
        for name, values in columns.items():
            if values.shape != (n,):
                raise ValueError(f"column {name!r} has shape {tuple(values.shape)}; it must be ({n},), one value a key")
        return {
            name: columns[name].to(own.device, own.dtype) if name in columns else _unknown(own.dtype, n, own.device)
            for name, own in self.columns.items()
        }

    def ordered(self) -> Tensor:
        """Return a copy of the real keys from the oldest to the newest, (filled, D)."""
        return torch.roll(self.keys, -int(self.ptr), 0)[self.size - int(self.filled) :]

    def extra_repr(self) -> str:
        """Show the settings in ``repr``."""
        return f"size={self.size}, dim={self.dim}, fill={self.fill!r}"

    # The state is plain tensors: these three do for them what nn.Module does for buffers.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeyQueue:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name in _STATE:
            old = getattr(self, name)
            new = fn(old)
            if new.dtype in _HALF:  # half precision is too coarse for keys: take the device, keep the dtype
                new = old.to(new.device)
            setattr(self, name, new)
        for name, old in self.columns.items():
            self.columns[name] = old.to(fn(old).device)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in _STATE:
            destination[prefix + name] = getattr(self, name)
        destination |= {f"{prefix}columns.{name}": column for name, column in self.columns.items()}

    @torch.no_grad()
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = {prefix + name: name for name in (*_STATE, *(f"columns.{column}" for column in self.columns))}
        missing_keys += [full for full in names if full not in state_dict]
        if strict:
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in names]
        if missing_keys and any(full in missing_keys for full in names):
            return
        saved = {name: state_dict[full] for full, name in names.items()}
        if saved["keys"].shape == self.keys.shape:
            if self.fill == "random":  # zeros are what fill="empty" has saved in place of keys
                free = torch.arange(self.size) >= int(saved["filled"])
                empty = free & ~saved["keys"].any(1).cpu()
                saved["keys"] = torch.where(empty[:, None].to(self.keys.device), self.keys, saved["keys"].to(self.keys))
            for name in _STATE:
                getattr(self, name).copy_(saved[name])
            for name, column in self.columns.items():
                column.copy_(saved[f"columns.{name}"])
        elif saved["keys"].ndim != 2 or saved["keys"].shape[1] != self.dim:
            error_msgs.append(
                f"{prefix}keys has shape {tuple(saved['keys'].shape)} in the checkpoint, and this queue takes keys of "
                f"dimension {self.dim}: build the model with the projection_dim of the checkpoint"
            )
        elif self.resize == "error":
            error_msgs.append(
                f"{prefix}keys: the checkpoint has a queue of {saved['keys'].shape[0]} keys and this one has "
                f"{self.size}. Build it with queue_size={saved['keys'].shape[0]}, or with resize='keep_newest'"
            )
        else:
            self._take_newest(saved)
        self._full = self.fill == "random"

    def _take_newest(self, saved: dict[str, Tensor]) -> None:
        size, filled = saved["keys"].shape[0], int(saved["filled"])
        newest = torch.arange(int(saved["ptr"]) - min(filled, self.size), int(saved["ptr"])) % size
        kept = saved["keys"][newest.to(saved["keys"].device)]
        self.keys[: len(kept)].copy_(kept)
        for name, column in self.columns.items():
            own = saved[f"columns.{name}"]
            column[: len(kept)].copy_(own[newest.to(own.device)])
        self.ptr.fill_(len(kept) % self.size)
        self.filled.fill_(len(kept))
        self.skipped.copy_(saved["skipped"])


def _column(name: str, kind: torch.dtype | str, size: int) -> Tensor:
    dtype = getattr(torch, kind, None) if isinstance(kind, str) else kind
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"columns: {name!r} has dtype {kind!r}; it must be one of torch's, such as torch.long")
    return _unknown(dtype, size, None)


def _unknown(dtype: torch.dtype, n: int, device: torch.device | None) -> Tensor:
    value = False if dtype == torch.bool else float("nan") if dtype.is_floating_point else -1
    return torch.full((n,), value, dtype=dtype, device=device)


def _unit(rows: Tensor) -> Tensor:
    """Normalise rows; those of unit length, to rounding, stay bit for bit: the queue holds the keys that were used."""
    norm = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    tolerance = 32 * torch.finfo(rows.dtype).eps
    return torch.where((norm - 1).abs() <= tolerance, rows, rows / norm.clamp_min(1e-12))
