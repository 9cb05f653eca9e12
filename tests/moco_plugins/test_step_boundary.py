"""Keys and key encoder move once per optimiser step that was really taken, and at no other time."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import small_backbone, small_views
from torch import Tensor, nn

from moco_plugins import MoCo

Views = list[Tensor]


def make(**options: object) -> MoCo:
    return MoCo(small_backbone(), 16, **{"queue_size": 40, "projection_dim": 8, "momentum": 0.9, **options}).double()


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def changed(module: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name.split(".")[0] for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for name, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[name]), name


def keys_now(moco: MoCo, images: Tensor) -> Tensor:
    with torch.no_grad():
        return F.normalize(moco.key_encoder(images), dim=1)


def train_step(moco: MoCo, optimizer: torch.optim.Optimizer, views: Views) -> float:
    loss = moco(views)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


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


def through_pickle(moco: MoCo) -> MoCo:
    return pickle.loads(pickle.dumps(moco))


@pytest.mark.parametrize("carry", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("when", ["at the start", "after a step", "after forward", "after backward"])
def test_a_copy_goes_on_by_itself(carry: Callable[[MoCo], MoCo], when: str) -> None:
    moco = make()
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    if when != "at the start":
        train_step(moco, optimizer, small_views(6))
    optimizer.zero_grad()
    if when == "after forward":
        loss = moco(small_views(6))
    elif when == "after backward":
        moco(small_views(6)).backward()
    other = carry(moco)
    assert_same(moco, other)
    started, filled, original = other.steps, int(other.queue.filled), snapshot(moco)

    # What the original has staged belongs to the original: its gradient is not in the copy.
    views = small_views(5)
    keys = keys_now(other, views[1])
    theirs = torch.optim.SGD(other.parameters(), 0.1)
    train_step(other, theirs, views)
    assert other.steps == started + 1
    assert int(other.queue.filled) == filled + 5
    assert torch.allclose(other.queue.ordered()[-5:], keys, atol=1e-12)
    assert not changed(moco, original)

    if when == "after forward":
        loss.backward()
    if when in ("after forward", "after backward"):
        optimizer.step()
        assert moco.steps == 2
        assert int(moco.queue.filled) == 12
    assert other.steps == started + 1


def test_copies_do_not_keep_the_original_alive_and_dead_models_are_forgotten() -> None:
    moco = make()
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    train_step(moco, optimizer, small_views(6))
    other, gone = copy.deepcopy(moco), weakref.ref(moco)
    del moco, optimizer
    gc.collect()
    assert gone() is None
    train_step(other, torch.optim.SGD(other.parameters(), 0.1), small_views(6))  # the dead one is no trouble
    assert other.steps == 2


def test_optimisers_step_while_models_die() -> None:
    survivor = make()
    optimizer = torch.optim.SGD(survivor.parameters(), 0.1)
    for _ in range(20):
        make()
        train_step(survivor, optimizer, small_views(4))
    assert survivor.steps == 20


def casts() -> Iterator[tuple[str, Callable[[MoCo], MoCo], torch.dtype]]:
    yield "float", lambda m: m.float(), torch.float32
    yield "double", lambda m: m.double(), torch.float64
    yield "bfloat16", lambda m: m.bfloat16(), torch.bfloat16
    yield "to", lambda m: m.to("cpu", torch.float32), torch.float32


@pytest.mark.parametrize(("name", "cast", "dtype"), list(casts()), ids=lambda value: value if str(value) else None)
def test_training_goes_on_after_a_move_to_another_dtype(
    name: str, cast: Callable[[MoCo], MoCo], dtype: torch.dtype
) -> None:
    moco = MoCo(small_backbone(), 16, queue_size=40, projection_dim=8, momentum=0.9)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    train_step(moco, optimizer, small_views(6, torch.float32))
    before = moco.queue.ordered().clone()
    moco = cast(moco)
    assert torch.allclose(moco.queue.ordered().float(), before, atol=1e-7)
    views = small_views(6, dtype)
    assert torch.isfinite(torch.tensor(train_step(moco, optimizer, views)))
    assert moco.steps == 2
    assert int(moco.queue.filled) == 12
    assert moco.queue.keys.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


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


def test_key_encoder_gets_no_gradient_and_the_loss_reaches_every_query_parameter() -> None:
    for variant in ("v1", "v2", "v2+", "v3"):
        moco = make(variant=variant, queue_size=0 if variant == "v3" else 40, hidden_dim=12)
        moco(small_views(6)).backward()
        assert all(p.grad is not None for p in moco.query_encoder.parameters())
        assert all(p.grad is None and not p.requires_grad for p in moco.key_encoder.parameters())
        if variant == "v3":
            assert all(p.grad is not None for p in moco.predictor.parameters())
