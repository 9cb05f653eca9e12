"""Keys and key encoder move once per optimiser step that was really taken, and at no other time."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import small_backbone, small_views
from torch import Tensor
from training import Views, assert_same, changed, keys_now, make, snapshot, train_step

from moco_plugins import MoCo


def test_forward_and_backward_move_nothing_and_the_step_moves_all() -> None:
    moco = make()
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    train_step(moco, optimizer, small_views(6))
    before, views = snapshot(moco), small_views(6)
    loss = moco(views)
    assert not changed(moco, before)
    loss.backward()
    assert not changed(moco, before)
    keys = keys_now(moco, views[1])
    optimizer.step()
    assert changed(moco, before) == {"query_encoder", "key_encoder", "queue", "steps"}
    assert torch.allclose(moco.queue.ordered()[-6:], keys, atol=1e-12)
    moved = snapshot(moco)
    optimizer.step()  # nothing was staged since: weights may move, MoCo's own state does not
    assert changed(moco, moved) <= {"query_encoder"}


@pytest.mark.parametrize("grad", [True, False])
def test_evaluation_leaves_everything_bit_identical(grad: bool) -> None:
    moco = MoCo(small_backbone(batch_norm=True), 16, variant="v2+", queue_size=40, projection_dim=8, drift_probe=4)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    train_step(moco, optimizer, small_views(8, torch.float32))
    before, random_state = snapshot(moco), torch.get_rng_state()
    views = small_views(8, torch.float32)
    torch.set_rng_state(random_state)
    moco.eval()
    with torch.set_grad_enabled(grad):
        first, second = moco(views), moco(views)
        moco.embed(views[0])
        moco.metrics()
    assert torch.equal(first.detach(), second.detach())
    assert not changed(moco, before)
    assert torch.equal(random_state, torch.get_rng_state())
    moco.train()
    assert not changed(moco, before)
    torch.optim.SGD(moco.parameters(), 0.0).step()  # nothing was staged by the evaluation
    assert not changed(moco, before)


def test_forward_without_gradient_in_train_mode_stages_nothing() -> None:
    moco = make()
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    with torch.no_grad():
        moco(small_views(6))
    views = small_views(5)
    train_step(moco, optimizer, views)
    assert int(moco.queue.filled) == 5


def test_a_validation_between_backward_and_step_is_not_part_of_the_step() -> None:
    moco, twin = make(), None
    twin = copy.deepcopy(moco)
    for model, validate in ((moco, True), (twin, False)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            views, other = small_views(6), small_views(9)
            loss = model(views)
            loss.backward()
            if validate:
                model.eval()
                model(other)
                model.train()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(moco, twin)


def scaled_steps(moco: MoCo, batches: list[Views], bad: set[int], make_optimizer: Callable[..., object]) -> list[bool]:
    """Train with a GradScaler; at the steps in ``bad`` a gradient overflows. Returns which steps were taken."""
    optimizer = make_optimizer(moco.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    taken = []
    for step, views in enumerate(batches):
        optimizer.zero_grad()
        before = moco.query_encoder.projector[0].weight.detach().clone()
        scaler.scale(moco(views)).backward()
        if step in bad:
            next(moco.query_encoder.parameters()).grad.view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        taken.append(not torch.equal(before, moco.query_encoder.projector[0].weight))
    return taken


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    # Without momentum: torch leaves the momentum of a first step that is skipped uninitialised.
    "fused SGD": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("variant", ["v2", "v2+"])
def test_a_step_skipped_by_the_grad_scaler_leaves_no_trace(name: str, variant: str) -> None:
    moco = MoCo(small_backbone(), 16, variant=variant, queue_size=40, projection_dim=8, momentum=0.9)
    twin = copy.deepcopy(moco)
    batches = [small_views(6 + step, torch.float32) for step in range(8)]
    bad = {0, 3, 4, 7}
    taken = scaled_steps(moco, batches, bad, OPTIMIZERS[name])
    assert [step for step, was in enumerate(taken) if not was] == sorted(bad)
    assert moco.steps == 4

    optimizer = OPTIMIZERS[name](twin.parameters())
    for step, views in enumerate(batches):
        if step not in bad:
            train_step(twin, optimizer, views)
    # The loss scale is a power of two, so that scaling is exact.
    for key, value in moco.state_dict().items():
        assert torch.allclose(value, twin.state_dict()[key], atol=1e-6), key
    assert torch.equal(moco.queue.filled, twin.queue.filled)


def test_a_skipped_accumulation_window_is_skipped_whole() -> None:
    moco = make()
    optimizer, scaler = torch.optim.SGD(moco.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    for window, overflow in enumerate((False, True, False)):
        optimizer.zero_grad()
        for part in range(3):
            loss = moco(small_views(4)) / 3
            scaler.scale(loss * torch.inf if overflow and part == 1 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert moco.steps == (1, 1, 2)[window]
        assert int(moco.queue.filled) == (12, 12, 24)[window]


def test_zero_grad_right_after_the_skipped_step_is_as_good() -> None:
    moco = make()
    optimizer, scaler = torch.optim.SGD(moco.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        loss = moco(small_views(4))
        scaler.scale(loss * torch.inf if step % 2 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert moco.steps == 2
    assert int(moco.queue.filled) == 8


@pytest.mark.parametrize("set_to_none", [True, False])
def test_forward_passes_by_the_thousand_do_not_change_what_a_step_commits(set_to_none: bool) -> None:
    moco = make(queue_size=30)
    optimizer = torch.optim.SGD(moco.parameters(), 0.01)
    for step in range(1, 60):
        loss = moco(small_views(4))
        optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward()
        optimizer.step()
        assert moco.steps == step
        assert int(moco.queue.filled) == min(30, 4 * step)


def test_gradients_thrown_away_on_purpose_throw_their_keys_away() -> None:
    # A training loop that drops a batch it does not like (a spike of the loss) calls zero_grad and goes on.
    moco = make()
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    moco(small_views(7)).backward()
    optimizer.zero_grad()
    train_step(moco, optimizer, small_views(5))
    assert int(moco.queue.filled) == 5


MOVES = ["micro-batch", "micro-batch", "step", "step and zero", "zero and micro-batch", "look on", "copy"]


@settings(max_examples=80, deadline=None)
@given(
    variant=st.sampled_from(["v2", "v2+"]),
    size=st.sampled_from([7, 60]),
    moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(1, 5)), min_size=4, max_size=20),
)
def test_a_step_commits_exactly_the_keys_whose_gradient_is_in_it_each_once(
    variant: str, size: int, moves: list[tuple[str, int]]
) -> None:
    # The key encoder never moves, so that keys can be known beforehand; each micro-batch has images of its own.
    torch.manual_seed(0)
    moco = make(variant=variant, queue_size=size, momentum=1.0)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    waiting: list[list[Tensor]] = []  # keys whose gradient is there and has not been used
    expected: deque[Tensor] = deque(maxlen=size)
    steps = 0
    for move, n in moves:
        views = small_views(n)
        if move.startswith("zero"):  # gradients are thrown away, as after a step that was skipped
            optimizer.zero_grad()
            waiting = []
        if move.endswith("micro-batch"):
            waiting.append([keys_now(moco, view) for view in views][0 if variant == "v2+" else 1 :])
            moco(views).backward()
        elif move.startswith("step"):
            optimizer.step()
            for view in zip(*waiting, strict=True):
                expected.extend(torch.cat(view))
            steps += bool(waiting)
            waiting = []
            if move == "step and zero":
                optimizer.zero_grad()
        elif move == "look on":
            moco.train(n % 2 == 0)
            with torch.set_grad_enabled(not moco.training):
                moco(views)
            moco.train()
        else:  # a copy has no gradients
            moco = copy.deepcopy(moco)
            optimizer = torch.optim.SGD(moco.parameters(), 0.1)
            waiting = []
        assert moco.steps == steps
        assert len(moco.queue.ordered()) == len(expected)
        if expected:
            assert torch.allclose(moco.queue.ordered(), torch.stack(list(expected)), atol=1e-12)


def test_key_encoder_gets_no_gradient_and_the_loss_reaches_every_query_parameter() -> None:
    for variant in ("v1", "v2", "v2+", "v3"):
        moco = make(variant=variant, queue_size=0 if variant == "v3" else 40, hidden_dim=12)
        moco(small_views(6)).backward()
        assert all(p.grad is not None for p in moco.query_encoder.parameters())
        assert all(p.grad is None and not p.requires_grad for p in moco.key_encoder.parameters())
        if variant == "v3":
            assert all(p.grad is not None for p in moco.predictor.parameters())
