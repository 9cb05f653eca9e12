"""The queue holds exactly the newest K finite keys, whatever it is given."""

from __future__ import annotations

import copy
import io
import pickle
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

from moco_plugins import KeyQueue

DIM = 3


def unit(n: int, dim: int = DIM) -> torch.Tensor:
    return F.normalize(torch.randn(n, dim), dim=1)


class RingAgainstDeque(RuleBasedStateMachine):
    """Any sequence of batches, good and bad rows mixed, copies and reloads in between."""

    @initialize(size=st.integers(1, 9), fill=st.sampled_from(["random", "empty"]), seed=st.integers(0, 2**30))
    def start(self, size: int, fill: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.queue = KeyQueue(size, DIM, fill=fill)
        self.expected: deque[torch.Tensor] = deque(maxlen=size)
        self.random_rows = self.queue.keys.clone()
        self.entered = self.turned_away = 0
        self.remember_addresses()

    def remember_addresses(self) -> None:
        self.addresses = [self.queue.keys.data_ptr(), self.queue.ptr.data_ptr(), self.queue.filled.data_ptr()]

    @rule(data=st.data())
    def enqueue(self, data: st.DataObject) -> None:
        n = data.draw(st.integers(0, 3 * self.queue.size), label="batch")
        bad = data.draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=n, max_size=n), label="bad rows")
        keys = unit(n)
        for row, kind in enumerate(bad):
            if kind:
                keys[row, row % DIM] = (torch.nan, torch.inf, -torch.inf)[kind - 1]
            else:
                self.expected.append(keys[row].clone())
                self.entered += 1
        self.turned_away += sum(kind > 0 for kind in bad)
        self.queue.enqueue(keys)

    @rule(how=st.sampled_from(["deepcopy", "pickle", "checkpoint"]))
    def carry_on_in_a_copy(self, how: str) -> None:
        if how == "deepcopy":
            self.queue = copy.deepcopy(self.queue)
        elif how == "pickle":
            self.queue = pickle.loads(pickle.dumps(self.queue))
        else:
            file = io.BytesIO()
            torch.save(self.queue.state_dict(), file)
            file.seek(0)
            self.queue = KeyQueue(self.queue.size, DIM, fill=self.queue.fill)
            self.queue.load_state_dict(torch.load(file, weights_only=True))
        self.remember_addresses()

    @invariant()
    def holds_the_newest_in_order(self) -> None:
        if not hasattr(self, "queue"):
            return
        size = self.queue.size
        rows = [tuple(row) for row in self.queue.ordered().tolist()]
        assert rows == [tuple(row) for row in torch.stack(list(self.expected)).tolist()] if self.expected else not rows
        assert int(self.queue.filled) == len(self.expected) == min(size, self.entered)
        assert int(self.queue.ptr) == self.entered % size
        assert int(self.queue.skipped) == self.turned_away

    @invariant()
    def negatives_are_what_is_there(self) -> None:
        if not hasattr(self, "queue"):
            return
        size, negatives = self.queue.size, self.queue.negatives()
        real = {tuple(row.tolist()) for row in self.expected}
        if self.queue.fill == "empty":
            assert len(negatives) == len(self.expected)
            assert {tuple(row) for row in negatives.tolist()} == real
        else:
            assert len(negatives) == size
            untouched = self.random_rows[self.entered :].tolist() if self.entered < size else []
            assert {tuple(row) for row in negatives.tolist()} == real | {tuple(row) for row in untouched}
        assert torch.isfinite(negatives).all()

    @invariant()
    def stays_where_it_is(self) -> None:
        if hasattr(self, "queue"):
            assert self.addresses == [
                self.queue.keys.data_ptr(),
                self.queue.ptr.data_ptr(),
                self.queue.filled.data_ptr(),
            ]


RingAgainstDeque.TestCase.settings = settings(max_examples=60, stateful_step_count=12, deadline=None)
TestRingAgainstDeque = RingAgainstDeque.TestCase


def test_batch_larger_than_the_queue_leaves_its_newest_keys() -> None:
    queue, keys = KeyQueue(10, DIM), unit(27)
    queue.enqueue(keys)
    assert torch.equal(queue.ordered(), keys[-10:])
    assert set(map(tuple, queue.negatives().tolist())) == set(map(tuple, keys[-10:].tolist()))


def test_an_epoch_whose_last_batch_does_not_divide_the_queue() -> None:
    # 50 000 images in batches of 128 leave a last batch of 80.
    queue, newest = KeyQueue(4096, 8), deque(maxlen=4096)
    for start in range(0, 50_000, 128):
        keys = unit(min(128, 50_000 - start), 8)
        queue.enqueue(keys)
        newest.extend(keys)
    assert torch.equal(queue.ordered(), torch.stack(list(newest)))
    assert int(queue.ptr) == 50_000 % 4096


def test_keys_are_normalised_on_entry_and_unit_keys_stay_bit_for_bit() -> None:
    queue = KeyQueue(8, DIM, fill="empty")
    long, keys = 7.3 * torch.randn(4, DIM), unit(4)
    queue.enqueue(long)
    queue.enqueue(keys)
    assert torch.allclose(queue.negatives()[:4], F.normalize(long, dim=1), atol=1e-6)
    assert torch.equal(queue.negatives()[4:], keys)


def test_random_fill_is_unit_vectors_that_count_as_not_filled() -> None:
    queue = KeyQueue(500, 16)
    assert torch.allclose(queue.negatives().norm(dim=1), torch.ones(500), atol=1e-5)
    assert int(queue.filled) == 0
    assert len(queue.ordered()) == 0
    assert float(queue.negatives().mean(0).norm()) < 0.2  # all directions


def test_empty_fill_offers_only_real_keys_until_it_is_full() -> None:
    queue = KeyQueue(5, DIM, fill="empty")
    assert queue.negatives().shape == (0, DIM)
    for expected in (2, 4, 5, 5):
        queue.enqueue(unit(2))
        assert queue.negatives().shape == (expected, DIM)


def test_a_batch_of_only_bad_rows_changes_nothing_but_the_count() -> None:
    queue = KeyQueue(6, DIM)
    queue.enqueue(unit(4))
    before = {name: value.clone() for name, value in queue.state_dict().items()}
    queue.enqueue(torch.full((15, DIM), torch.nan))
    after = queue.state_dict()
    assert int(after.pop("skipped")) == 15
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def test_negatives_share_the_queues_memory() -> None:
    queue = KeyQueue(16, DIM)
    assert queue.negatives().data_ptr() == queue.keys.data_ptr()
    assert queue.keys.is_contiguous()
    assert queue.keys.shape == (16, DIM)


def test_keys_of_the_queue_itself_may_be_enqueued() -> None:
    queue = KeyQueue(6, DIM)
    queue.enqueue(unit(6))
    first, second = queue.keys[0].clone(), queue.keys[1].clone()
    queue.enqueue(queue.keys[:2])
    assert torch.equal(queue.ordered()[-2:], torch.stack([first, second]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_keys_of_any_dtype_enter_a_float32_queue(dtype: torch.dtype) -> None:
    queue, keys = KeyQueue(4, DIM, fill="empty"), unit(3).to(dtype)
    queue.enqueue(keys)
    assert queue.keys.dtype == torch.float32
    assert torch.allclose(queue.negatives(), F.normalize(keys.float(), dim=1), atol=1e-6)


def test_half_precision_casts_leave_the_queue_in_float32_and_double_widens_it() -> None:
    for cast in (nn.Module.half, nn.Module.bfloat16, lambda module: module.to(torch.float16)):
        queue = KeyQueue(4, DIM)
        before = queue.keys.clone()
        cast(nn.Sequential(queue))
        assert queue.keys.dtype == torch.float32
        assert torch.equal(queue.keys, before)
        assert queue.ptr.dtype == torch.int64
    assert KeyQueue(4, DIM).double().keys.dtype == torch.float64


def test_queue_built_under_another_default_dtype() -> None:
    for default, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        torch.set_default_dtype(default)
        try:
            for fill in ("random", "empty"):
                assert KeyQueue(4, DIM, fill=fill).keys.dtype == expected
        finally:
            torch.set_default_dtype(torch.float32)


def test_enqueue_takes_no_gradient() -> None:
    queue, keys = KeyQueue(4, DIM), unit(2).requires_grad_()
    queue.enqueue(keys)
    assert not queue.keys.requires_grad
    assert not queue.negatives().requires_grad


def test_queue_is_saved_but_is_no_buffer_for_frameworks_to_sync() -> None:
    queue = nn.Sequential(KeyQueue(4, DIM))
    assert {"0.keys", "0.ptr", "0.filled"} <= set(queue.state_dict())
    assert not list(queue.buffers())
    assert not list(queue.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size=0.*at least 1"),
        ({"size": -3}, "size=-3.*at least 1"),
        ({"size": 2.5}, "size=2.5.*whole number"),
        ({"dim": 0}, "dim=0.*at least 1"),
        ({"fill": "zeros"}, "fill='zeros'.*'random' or 'empty'"),
        ({"resize": "crop"}, "resize='crop'.*'error' or 'keep_newest'"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeyQueue(**{"size": 4, "dim": DIM, **arguments})


@pytest.mark.parametrize("shape", [(DIM,), (2, DIM + 1), (DIM, 2), (2, 1, DIM)])
def test_keys_of_a_wrong_shape(shape: tuple[int, ...]) -> None:
    queue = KeyQueue(4, DIM)
    with pytest.raises(ValueError, match=rf"keys.*{len(shape) and shape[0]}.*\(N, 3\)"):
        queue.enqueue(torch.randn(shape))
    assert int(queue.filled) == 0
