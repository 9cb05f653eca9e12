"""Fifty steps of MoCo against the plain reference: loss, key encoder, queue."""

from __future__ import annotations

import pytest
import torch
from reference import PlainMoCo, small_backbone, small_views
from torch import Tensor, nn

from moco_plugins import Cosine, MoCo

#: The reference always computes in float64: in float32 its own rounding would be as large as what is looked for.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def make_pair(dtype: torch.dtype = torch.float64, backbone: nn.Module | None = None, **options: object):
    options = {"queue_size": 53, "projection_dim": 8, "momentum": 0.9, "temperature": 0.2, **options}
    moco = MoCo(backbone or small_backbone(), 16, **options).to(dtype)
    momentum = options["momentum"]
    plain = PlainMoCo(
        moco.query_encoder,
        moco.key_encoder,
        moco.queue.keys if moco.queue is not None else None,
        momentum=(lambda step: momentum(step, moco.total_steps)) if callable(momentum) else momentum,
        temperature=options["temperature"],
        symmetric=moco.settings.symmetric,
        in_batch_negatives=moco.settings.in_batch_negatives,
        predictor=moco.predictor,
    )
    return moco, plain


def assert_close(a: Tensor, b: Tensor, tolerance: float) -> None:
    assert a.shape == b.shape
    assert float((a.detach() - b.detach()).abs().max()) <= tolerance


def assert_same_state(moco: MoCo, plain: PlainMoCo, tolerance: float) -> None:
    """The reference moves its key encoder at the start of the next forward pass: do that first."""
    plain.move_key_encoder()
    for mine, theirs in zip(moco.query_encoder.parameters(), plain.query_encoder.parameters(), strict=True):
        assert_close(mine, theirs, tolerance)
    for mine, theirs in zip(moco.key_encoder.parameters(), plain.key_encoder.parameters(), strict=True):
        assert_close(mine, theirs, tolerance)
    for mine, theirs in zip(moco.key_encoder.buffers(), plain.key_encoder.buffers(), strict=True):
        assert_close(mine.double(), theirs.double(), tolerance)
    if moco.queue is not None:
        assert_close(moco.queue.keys, plain.queue, tolerance)
        assert int(moco.queue.ptr) == plain.pointer


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"variant": "v1"},
        {"variant": "v2"},
        {"variant": "v2", "in_batch_negatives": True},
        {"variant": "v2+"},
        {"variant": "v2+", "in_batch_negatives": True},
        {"variant": "v2", "queue_size": 5},  # smaller than the batches
        {"variant": "v2", "queue_size": 1},
    ],
    ids=str,
)
def test_fifty_steps_equal_the_paper(options: dict[str, object], dtype: torch.dtype) -> None:
    moco, plain = make_pair(dtype, **options)
    plain.to(torch.float64)
    ours = torch.optim.SGD(moco.parameters(), 0.03, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), 0.03, momentum=0.9)
    for step in range(50):
        views = small_views((7, 16, 3)[step % 3], dtype)
        loss = moco(views)
        ours.zero_grad()
        loss.backward()
        ours.step()
        expected = plain.train_step([view.double() for view in views], theirs)
        assert abs(float(loss.detach()) - expected) <= TOLERANCE[dtype]
        if moco.queue is not None:
            assert_close(moco.queue.keys, plain.queue, TOLERANCE[dtype])
    assert moco.steps == 50
    assert_same_state(moco, plain, TOLERANCE[dtype])


def test_v3_equals_the_paper_with_its_momentum_schedule() -> None:
    moco, plain = make_pair(
        variant="v3", queue_size=0, hidden_dim=12, momentum=Cosine(0.9, 1.0), total_steps=50, projection_dim=8
    )
    assert moco.queue is None
    ours = torch.optim.AdamW(moco.parameters(), 1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), 1e-3)
    for _ in range(50):
        views = small_views(9)
        loss = moco(views)
        ours.zero_grad()
        loss.backward()
        ours.step()
        assert abs(float(loss.detach()) - plain.train_step(views, theirs)) <= 1e-9
    assert_same_state(moco, plain, 1e-9)


def test_key_encoder_has_batch_statistics_of_its_own() -> None:
    moco, plain = make_pair(backbone=small_backbone(batch_norm=True), shuffle_bn=False)
    ours, theirs = torch.optim.SGD(moco.parameters(), 0.1), torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(20):
        views = small_views(12)
        loss = moco(views)
        ours.zero_grad()
        loss.backward()
        ours.step()
        assert abs(float(loss.detach()) - plain.train_step(views, theirs)) <= 1e-10
    assert_same_state(moco, plain, 1e-10)
    query, key = dict(moco.query_encoder.named_buffers()), dict(moco.key_encoder.named_buffers())
    assert any(not torch.equal(query[name], key[name]) for name in query)


@pytest.mark.parametrize("variant", ["v2", "v2+"])
@pytest.mark.parametrize("parts", [[32, 32, 32, 32], [128], [60, 7, 1, 60], [1] * 9], ids=str)
def test_accumulated_parts_equal_the_whole_batch(parts: list[int], variant: str) -> None:
    moco, plain = make_pair(variant=variant, queue_size=300)
    ours, theirs = torch.optim.SGD(moco.parameters(), 0.1), torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(8):
        views = small_views(sum(parts))
        total = 0.0
        ours.zero_grad()
        for first, second in zip(*(view.split(parts) for view in views), strict=True):
            part = moco([first, second]) * (len(first) / sum(parts))
            part.backward()
            total += float(part.detach())
        ours.step()
        assert abs(total - plain.train_step(views, theirs)) <= 1e-10
    assert moco.steps == 8
    assert_same_state(moco, plain, 1e-10)


def test_one_backward_over_several_forward_passes_equals_the_whole_batch() -> None:
    moco, plain = make_pair(queue_size=100)
    ours, theirs = torch.optim.SGD(moco.parameters(), 0.1), torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(6):
        views = small_views(24)
        parts = list(zip(*(view.split(8) for view in views), strict=True))
        loss = torch.stack([moco(part) for part in parts]).mean()
        ours.zero_grad()
        loss.backward()
        ours.step()
        assert abs(float(loss.detach()) - plain.train_step(views, theirs)) <= 1e-10
    assert_same_state(moco, plain, 1e-10)


def test_an_uneven_last_window_is_a_step_like_any_other() -> None:
    moco, plain = make_pair(queue_size=64)
    ours, theirs = torch.optim.SGD(moco.parameters(), 0.1), torch.optim.SGD(plain.parameters(), 0.1)
    for window in ([8, 8, 8, 8], [8, 8, 8, 8], [8, 5]):
        views = small_views(sum(window))
        ours.zero_grad()
        for part in zip(*(view.split(window) for view in views), strict=True):
            (moco(part) * (len(part[0]) / sum(window))).backward()
        ours.step()
        plain.train_step(views, theirs)
    assert moco.steps == 3
    assert_same_state(moco, plain, 1e-10)


def test_positive_is_never_in_the_queue_and_a_symmetric_batch_never_contrasts_with_itself() -> None:
    # With all keys of the batch in the queue beforehand the loss would be about ln 2 higher for each query.
    for variant in ("v2", "v2+"):
        moco, plain = make_pair(variant=variant, queue_size=6)
        optimizer = torch.optim.SGD(moco.parameters(), 0.0)
        theirs = torch.optim.SGD(plain.parameters(), 0.0)
        views = small_views(3)
        for _ in range(3):
            loss = moco(views)
            assert float(loss.detach()) == pytest.approx(plain.train_step(views, theirs), abs=1e-12)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_momentum_and_temperature_schedules_are_those_of_the_step() -> None:
    seen: list[tuple[int, int | None]] = []

    def temperature(step: int, total: int | None) -> float:
        seen.append((step, total))
        return 0.5 / (step + 1)

    moco = MoCo(small_backbone(), 16, queue_size=20, projection_dim=8, temperature=temperature, total_steps=4).double()
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    seen.clear()
    for step in range(4):
        views = small_views(5)
        loss = moco(views)
        assert set(seen) == {(step, 4)}
        assert moco.metrics()["temperature"] == pytest.approx(0.5 / (step + 1))
        loss.backward()
        optimizer.step()
        seen.clear()


def test_learnable_temperature_gets_the_gradient_of_the_dense_formula() -> None:
    moco = MoCo(small_backbone(), 16, queue_size=20, projection_dim=8, temperature=0.3, learnable_temperature=True)
    moco = moco.double()
    views = small_views(5)
    moco(views).backward()
    with torch.no_grad():
        q = nn.functional.normalize(moco.query_encoder(views[0]), dim=1)
        k = nn.functional.normalize(moco.key_encoder(views[1]), dim=1)
    log_t = torch.tensor(0.3, dtype=torch.float64).log().requires_grad_()
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ moco.queue.keys.T], 1) / log_t.exp()
    nn.functional.cross_entropy(logits, torch.zeros(5, dtype=torch.long)).backward()
    assert moco.log_temperature.grad is not None
    assert float(moco.log_temperature.grad) == pytest.approx(float(log_t.grad), abs=1e-7)
    before = float(moco.temperature.detach())
    torch.optim.SGD(moco.parameters(), 0.1).step()
    assert float(moco.temperature.detach()) != before
