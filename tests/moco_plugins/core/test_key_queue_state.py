"""Saving, loading and resizing the queue."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F

from moco_plugins import KeyQueue

DIM = 3


def unit(n: int, dim: int = DIM) -> torch.Tensor:
    return F.normalize(torch.randn(n, dim), dim=1)


@pytest.mark.parametrize("new_size", [4, 7, 20])
@pytest.mark.parametrize("entered", [0, 3, 5, 7, 16])
def test_resize_keeps_the_newest_keys_in_order(new_size: int, entered: int) -> None:
    old = KeyQueue(7, DIM)
    keys = unit(entered)
    old.enqueue(keys)
    new = KeyQueue(new_size, DIM, resize="keep_newest")
    new.load_state_dict(old.state_dict())
    kept = min(entered, 7, new_size)
    expected = keys[entered - kept :]
    assert torch.equal(new.ordered(), expected)
    more = unit(3)
    new.enqueue(more)
    assert torch.equal(new.ordered(), torch.cat([expected, more])[-new_size:])


def test_loading_another_size_is_an_error_that_names_both_sizes() -> None:
    state = KeyQueue(7, DIM).state_dict()
    with pytest.raises(RuntimeError, match=r"(?s)7.*9.*keep_newest"):
        KeyQueue(9, DIM).load_state_dict(state)


def test_loading_another_dimension_is_an_error_even_with_resize() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)\(7, 3\).*5.*projection_dim"):
        KeyQueue(7, 5, resize="keep_newest").load_state_dict(KeyQueue(7, DIM).state_dict())


def test_loading_a_checkpoint_without_queue_is_an_error_and_changes_nothing() -> None:
    queue = KeyQueue(7, DIM)
    queue.enqueue(unit(3))
    before = queue.keys.clone()
    with pytest.raises(RuntimeError, match="keys"):
        queue.load_state_dict({})
    assert torch.equal(queue.keys, before)


def test_a_full_queue_that_loads_an_emptier_one_offers_only_what_was_loaded() -> None:
    full, other = KeyQueue(5, DIM, fill="empty"), KeyQueue(5, DIM, fill="empty")
    full.enqueue(unit(9))
    assert len(full.negatives()) == 5
    other.enqueue(unit(2))
    full.load_state_dict(other.state_dict())
    assert torch.equal(full.negatives(), other.negatives())
    assert len(full.negatives()) == 2


@pytest.mark.parametrize("size", [5, 8])
def test_a_queue_of_random_rows_that_loads_one_without_keeps_its_own_where_there_are_no_keys(size: int) -> None:
    saved, queue = KeyQueue(5, DIM, fill="empty"), KeyQueue(size, DIM, resize="keep_newest")
    saved.enqueue(unit(2))
    queue.load_state_dict(saved.state_dict())
    assert torch.equal(queue.ordered(), saved.ordered())
    assert torch.allclose(queue.negatives().norm(dim=1), torch.ones(size), atol=1e-5)


def test_saved_state_is_plain_tensors() -> None:
    file = io.BytesIO()
    torch.save(KeyQueue(4, DIM).state_dict(), file)
    file.seek(0)
    assert set(torch.load(file, weights_only=True)) == {"keys", "ptr", "filled", "skipped"}
