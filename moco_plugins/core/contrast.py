"""What all losses against a queue begin with: queries, positives and negatives checked, in one dtype, masks by id."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .logsumexp import IMPLEMENTATIONS, Keys, logsumexp, on_device, softmax_mean, use_fused

_Loss = TypeVar("_Loss", bound=Callable[..., Tensor])
_Ids = Tensor | None | Sequence[Tensor | None]


class ContrastiveLoss(Protocol):
    """What a loss plugged into MoCo looks like; :func:`moco_plugins.info_nce` is one.

    A loss that has further arguments ``ids`` and ``negative_ids``, or ``labels`` and ``negative_labels``, is given them:
    (N) of the queries and (K) of the negatives, one tensor for each set of negatives; -1 is unknown.
    """

    def __call__(
        self,
        query: Tensor,
        positive: Tensor,
        negatives: Keys | Sequence[Keys],
        temperature: float | Tensor,
        in_batch_negatives: bool = False,
    ) -> Tensor:
        """Return the loss, 0-dim."""


@dataclass(frozen=True, eq=False, repr=False)
class Contrast:
    """Queries (N, D), their positives (N, D), sets of negatives (K, D) with their ids, and T."""

    query: Tensor
    positive: Tensor
    temperature: Tensor
    banks: list[Keys]
    bank_ids: list[Tensor | None]
    ids: Tensor | None
    in_batch: bool
    implementation: str

    @property
    def positive_logit(self) -> Tensor:
        """q·k / T, (N)."""
        return (self.query * self.positive).sum(1, dtype=self.temperature.dtype) / self.temperature

    def others(self) -> tuple[list[Keys], dict[str, Any]]:
        """The negatives, and the ids that keep each query from its own image: arguments of :func:`logsumexp`."""
        banks, bank_ids, ids = list(self.banks), list(self.bank_ids), self.ids
        if self.in_batch:  # a number of its own for each row of the batch, unless it has an id, keeps out its positive
            order = -2 - torch.arange(len(self.query), device=self.query.device)
            ids = order if ids is None else torch.where(ids < 0, order, ids)
            banks.insert(0, self.positive)
            bank_ids.insert(0, ids)
        elif ids is not None:
            ids = torch.where(ids < 0, -2, ids)
        return banks, {"query_ids": ids, "key_ids": bank_ids}

    def lse(self, temperature: Tensor | None = None) -> Tensor:
        """The logsumexp over the negatives, (N); -inf where there is none."""
        banks, ids = self.others()
        at = self.temperature if temperature is None else temperature
        return logsumexp(self.query, banks, at, **ids, implementation=self.implementation)

    def mean_for(self, query: Tensor, temperature: float) -> Tensor:
        """The negatives' mean (N, D), weighted by their softmax for other queries than ours."""
        banks, ids = self.others()
        return softmax_mean(query, banks, temperature, **ids, implementation=self.implementation)

    def count(self) -> Tensor:
        """How many negatives each query has, (N)."""
        banks, ids = self.others()
        total = self.query.new_full((len(self.query),), sum(bank.shape[0] for bank in banks))
        own = ids["query_ids"]
        for bank, numbers in zip(banks, ids["key_ids"], strict=True):
            if own is not None and (numbers is not None or not isinstance(bank, Tensor)):
                total = total - (matches(own, numbers) if isinstance(bank, Tensor) else bank.matches(own))
        return total


def matches(query_ids: Tensor, key_ids: Tensor) -> Tensor:
    """How many keys have the id of each query, (N); no (N, K) matrix."""
    ordered = key_ids.sort().values
    return torch.searchsorted(ordered, query_ids, right=True) - torch.searchsorted(ordered, query_ids)


def class_sums(keys: Tensor, key_labels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum (N, D) and the number (N) of the keys (K, D) that have the label of each row, without an (N, K) matrix."""
    ordered = labels.sort().values
    slot = torch.searchsorted(ordered, key_labels).clamp_(max=len(ordered) - 1)  # K
    slot = torch.where(ordered[slot] == key_labels, slot, len(ordered))  # the last one holds what nobody asked for
    sums = keys.new_zeros(len(ordered) + 1, keys.shape[1]).index_add_(0, slot, keys)
    numbers = keys.new_zeros(len(ordered) + 1).index_add_(0, slot, torch.ones_like(keys[:, 0]))
    mine = torch.searchsorted(ordered, labels)  # the first of equal ones, as above
    return sums[mine], numbers[mine]


def contrast(
    query: Tensor,
    positive: Tensor,
    negatives: Keys | Sequence[Keys],
    temperature: float | Tensor,
    in_batch_negatives: bool,
    implementation: str,
    ids: Tensor | None = None,
    negative_ids: _Ids = None,
) -> Contrast:
    """Check the arguments of a loss and bring them together; half-precision queries against a float32 queue are float32.

    Raises:
        ValueError: shapes do not match, T <= 0, or an unknown implementation.
    """
    banks: list[Any] = list(negatives) if isinstance(negatives, (list, tuple)) else [negatives]
    numbers: list[Any] = list(negative_ids) if isinstance(negative_ids, (list, tuple)) else [negative_ids] * len(banks)
    _check(query, positive, banks, temperature, implementation)
    check_rows("ids", ids, query)
    for bank, own in zip(banks, numbers, strict=True):
        if isinstance(bank, Tensor):
            check_rows("negative_ids", own, bank)
    kept = [(bank, own) for bank, own in zip(banks, numbers, strict=True) if bank.shape[0]]
    kind = functools.reduce(
        torch.promote_types, (t.dtype for t in (positive, *(bank for bank, _ in kept))), query.dtype
    )
    query = query.to(kind)
    if implementation == "fused":
        use_fused(query, [positive], implementation)  # says so where it cannot be
    return Contrast(
        query,
        positive.to(kind),
        on_device(temperature, query),
        [bank.to(kind) if isinstance(bank, Tensor) else bank for bank, _ in kept],
        [own for _, own in kept],
        ids,
        in_batch_negatives,
        implementation,
    )


def full_precision(loss: _Loss) -> _Loss:
    """Switch autocast off in a loss: logits / 0.07 in half precision lose what tells keys apart."""

    @functools.wraps(loss)
    def precise(query: Tensor, *args: Any, **options: Any) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):
            return loss(query, *args, **options)

    return precise  # type: ignore[return-value]


#: What MoCo gives a loss by itself: no options.
_GIVEN = ("query", "positive", "negatives", "temperature", "in_batch_negatives")
_GIVEN_WHERE_KNOWN = ("ids", "negative_ids", "labels", "negative_labels")


def check_options(name: str, loss: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise where a loss is built with options it has not.

    Raises:
        TypeError: the message lists those it has.
    """
    known = [p for p in inspect.signature(loss).parameters if p not in (*_GIVEN, *_GIVEN_WHERE_KNOWN)]
    for option, value in options.items():
        if option not in known:
            raise TypeError(
                f"loss_options: {option}={value!r} is no option of loss={name!r}; it has {', '.join(known)}"
            )


def check_rows(name: str, numbers: Tensor | None, rows: Tensor) -> None:
    """Check labels or ids, one for each row, by their shape and dtype."""
    if numbers is None:
        return
    shape = tuple(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
    if not isinstance(numbers, Tensor) or numbers.shape != rows.shape[:1]:
        raise ValueError(f"{name} has shape {shape}; it must be a tensor ({rows.shape[0]},), one whole number a row")
    if numbers.is_floating_point() or numbers.is_complex():
        raise ValueError(
            f"{name} has dtype {numbers.dtype}; it must hold whole numbers, -1 where unknown: {name}.long()"
        )


def _check(query: Tensor, positive: Tensor, banks: list[Any], temperature: float | Tensor, implementation: str) -> None:
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
        if len(bank.shape) != 2 or bank.shape[1] != query.shape[1]:
            raise ValueError(
                f"negatives has shape {tuple(bank.shape)}; it must be (K, {query.shape[1]}), one row a key "
                "(a queue stored as (D, K) must be transposed)"
            )
    for name, tensor in (("query", query), ("positive", positive), *(("negatives", bank) for bank in banks)):
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{name} has dtype {tensor.dtype}; it must be a floating-point tensor")
    if not isinstance(temperature, Tensor) and not temperature > 0:
        raise ValueError(f"temperature={temperature} must be greater than 0 (0.07 in MoCo v1, 0.2 in v2)")
    if isinstance(temperature, Tensor) and temperature.ndim != 0:
        raise ValueError(f"temperature has shape {tuple(temperature.shape)}; it must be a number or a 0-dim tensor")
