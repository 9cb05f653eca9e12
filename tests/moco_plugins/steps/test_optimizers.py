"""Whose step it is: one optimiser or several, foreign ones, wrappers, closures, steps by hand."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable

import pytest
import torch
from reference import small_views
from torch import Tensor, nn
from training import assert_same, changed, make, snapshot, train_step


def test_several_optimisers_that_share_the_query_encoder_make_one_step() -> None:
    moco = make()
    twin = copy.deepcopy(moco)
    both = [
        torch.optim.SGD(moco.query_encoder.backbone.parameters(), 0.1),
        torch.optim.SGD(moco.query_encoder.projector.parameters(), 0.1),
    ]
    one = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(6):
        views = small_views(5)
        moco(views).backward()
        twin(views).backward()
        one.step()
        one.zero_grad()
        for optimizer in both:
            optimizer.step()
        for optimizer in both:
            optimizer.zero_grad()
    assert moco.steps == 6
    assert_same(moco, twin)


def test_an_optimiser_of_something_else_moves_nothing() -> None:
    moco, probe = make(), nn.Linear(16, 10).double()
    own, foreign = torch.optim.SGD(moco.parameters(), 0.1), torch.optim.SGD(probe.parameters(), 0.1)
    views = small_views(6)
    moco(views).backward()
    before = snapshot(moco)
    for _ in range(2):
        probe(moco.embed(views[0]).detach()).sum().backward()
        foreign.step()
    assert not changed(moco, before)
    own.step()
    assert moco.steps == 1
    assert int(moco.queue.filled) == 6


def test_training_with_an_optimiser_that_does_not_own_the_query_encoder_is_reported() -> None:
    moco = make()
    stranger = torch.optim.SGD(copy.deepcopy(moco).parameters(), 0.1)

    def train() -> None:
        for _ in range(5):
            moco(small_views(6)).backward()
            stranger.step()

    with pytest.warns(UserWarning, match=r"SGD.*owns no parameter.*moco\.parameters\(\)"):
        train()
    assert moco.steps == 0
    assert int(moco.queue.filled) == 0


def test_only_a_model_that_is_still_used_speaks_of_foreign_steps() -> None:
    interrupted, used = make(), make()
    optimizer = torch.optim.SGD(used.parameters(), 0.1)
    interrupted(small_views(6)).backward()  # and then Ctrl-C
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            train_step(used, optimizer, small_views(6))
    assert (interrupted.steps, used.steps) == (0, 8)


@pytest.mark.parametrize(
    ("variant", "left_out"), [("v2", "query_encoder.backbone"), ("v2", "query_encoder.projector"), ("v3", "predictor")]
)
def test_an_optimiser_that_leaves_out_a_part_is_reported(variant: str, left_out: str) -> None:
    moco = make(variant=variant, queue_size=0) if variant == "v3" else make()
    owned = [p for name, p in moco.named_parameters() if p.requires_grad and not name.startswith(left_out)]
    optimizer = torch.optim.SGD(owned, 0.1)

    def train() -> None:
        for _ in range(6):
            optimizer.zero_grad()
            moco(small_views(6)).backward()
            optimizer.step()

    with pytest.warns(UserWarning, match=rf"no optimiser that has stepped owns {left_out}.*not trained") as caught:
        train()
    assert len([w for w in caught if "not trained" in str(w.message)]) == 1
    assert moco.steps == 6


def test_two_optimisers_that_share_the_parameters_leave_out_nothing() -> None:
    moco = make()
    halves = [moco.query_encoder.backbone, moco.query_encoder.projector]
    optimizers = [torch.optim.SGD(half.parameters(), 0.1) for half in halves]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(8):
            moco.zero_grad()
            moco(small_views(6)).backward()
            for optimizer in optimizers if step % 2 else optimizers[:1]:  # the second steps half as often
                optimizer.step()
    assert moco.steps == 8


def test_nothing_is_reported_where_a_discriminator_steps_in_turn() -> None:
    moco, other = make(), nn.Linear(4, 4)
    own, foreign = torch.optim.SGD(moco.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(8):
            other(torch.randn(2, 4)).sum().backward()
            loss = moco(small_views(6))
            loss.backward()
            foreign.step()
            own.step()
            own.zero_grad()
    assert moco.steps == 8


def test_two_models_are_followed_each_by_its_own_optimiser() -> None:
    models = [make(), make()]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    for m in models:
        m(small_views(6)).backward()
    optimizers[1].step()
    assert [m.steps for m in models] == [0, 1]
    optimizers[0].step()
    assert [m.steps for m in models] == [1, 1]


def test_one_optimiser_may_own_two_models() -> None:
    models = [make(), make()]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], 0.1)
    for m in models:
        m(small_views(6)).backward()
    optimizer.step()
    assert [m.steps for m in models] == [1, 1]
    assert [int(m.queue.filled) for m in models] == [6, 6]


def test_parameters_added_to_the_optimiser_later_are_followed() -> None:
    moco = make()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    optimizer.add_param_group({"params": list(moco.query_encoder.parameters())})
    train_step(moco, optimizer, small_views(6))
    assert moco.steps == 1


def test_lbfgs_style_closures_commit_once() -> None:
    moco = make()
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    views = small_views(6)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = moco(views)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert moco.steps == 1
    assert int(moco.queue.filled) == 6


def test_explicit_steps() -> None:
    moco, twin = make(follow_optimizer=False), make()
    twin.load_state_dict(moco.state_dict())
    ours, theirs = torch.optim.SGD(moco.parameters(), 0.1), torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(4):
        views = small_views(6)
        before = snapshot(moco)
        train_step(moco, ours, views)
        assert changed(moco, before) == {"query_encoder"}
        moco.step()
        moco.step()  # a second call finds nothing to do
        train_step(twin, theirs, views)
    assert_same(moco, twin)


def test_explicit_step_after_an_automatic_one_does_nothing() -> None:
    moco = make()
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    train_step(moco, optimizer, small_views(6))
    before = snapshot(moco)
    moco.step()
    assert not changed(moco, before)


class TwiceAStep(torch.optim.Optimizer):
    """A wrapper that steps an inner optimiser and then changes the weights once more, as several do."""

    def __init__(self, inner: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        self.inner = inner
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:
        self.inner.step()
        with torch.no_grad():
            for parameter in self.inner.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)


@pytest.mark.parametrize("known_parameters", [True, False])
def test_a_step_within_a_step_is_taken_when_the_outer_one_is_over(known_parameters: bool) -> None:
    moco, other = make(), nn.Parameter(torch.zeros(1))
    twin = copy.deepcopy(moco)
    ours = TwiceAStep(torch.optim.SGD(moco.parameters(), 0.1), moco.parameters() if known_parameters else [other])
    theirs = torch.optim.SGD(twin.parameters(), 0.2)
    for _ in range(4):
        views = small_views(6)
        for model, optimizer in ((moco, ours), (twin, theirs)):
            model(views).backward()
            optimizer.step()
            model.zero_grad()
    for name, value in twin.state_dict().items():
        assert torch.allclose(moco.state_dict()[name].double(), value.double(), atol=1e-12), name


def test_an_optimiser_whose_step_fails_does_not_stop_the_others() -> None:
    moco, other = make(), nn.Parameter(torch.zeros(1))
    optimizer, broken = torch.optim.SGD(moco.parameters(), 0.1), TwiceAStep(torch.optim.SGD([other], 0.1), [other])
    broken.inner.param_groups = []
    for step in range(1, 4):
        moco(small_views(6)).backward()
        with pytest.raises(IndexError):
            broken.step()
        optimizer.step()
        optimizer.zero_grad()
        assert moco.steps == step


def test_a_compiled_optimiser_step_is_a_step() -> None:
    moco = make()
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    for step in range(1, 4):
        moco(small_views(6)).backward()
        compiled()
        optimizer.zero_grad()
        assert moco.steps == step
        assert int(moco.queue.filled) == 6 * step
    torch._dynamo.reset()


def test_clipping_and_schedulers_are_no_trouble() -> None:
    moco = make()
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for _ in range(5):
        moco(small_views(6)).backward()
        nn.utils.clip_grad_norm_(moco.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert moco.steps == 5
