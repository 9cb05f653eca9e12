"""A checkpoint is complete: a resumed run is bit for bit the run that was never interrupted."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from reference import small_backbone, small_views
from torch import Tensor, nn

from moco_plugins import Cosine, MoCo


def make(**options: Any) -> MoCo:
    backbone = small_backbone(batch_norm=options.pop("batch_norm", False))
    return MoCo(backbone, 16, **{"queue_size": 50, "projection_dim": 8, "momentum": 0.9, **options})


def make_optimizer(moco: MoCo) -> torch.optim.Optimizer:
    return torch.optim.AdamW(moco.parameters(), 1e-3)


def batch(step: int) -> list[Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(1000 + step)
        return small_views(9, torch.float32)


def train(moco: MoCo, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = moco(batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


SETTINGS: dict[str, dict[str, Any]] = {
    "v1": {"variant": "v1"},
    "v2": {},
    "v2+": {"variant": "v2+"},
    "v3": {"variant": "v3", "queue_size": 0, "hidden_dim": 12, "momentum": Cosine(0.9, 1.0), "total_steps": 20},
    "BatchNorm, split": {"batch_norm": True},
    "BatchNorm, averaged": {"batch_norm": True, "bn_buffers": "ema"},
    "BatchNorm, copied": {"batch_norm": True, "bn_buffers": "copy"},
    "learnable temperature": {"learnable_temperature": True},
    "empty queue": {"queue_fill": "empty"},
    "schedules": {
        "temperature": lambda step, total: 0.5 / (1 + step),
        "momentum": lambda step, total: 1 - 0.4 / (1 + step),
    },
    "drift probe": {"drift_probe": 4, "batch_norm": True},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("split", [1, 3, 10])
def test_resumed_run_is_bit_identical(setting: str, split: int) -> None:
    options = SETTINGS[setting]
    torch.manual_seed(0)
    straight = make(**options)
    interrupted = copy.deepcopy(straight)
    optimizer = make_optimizer(straight)
    losses = train(straight, optimizer, range(20))

    optimizer = make_optimizer(interrupted)
    first = train(interrupted, optimizer, range(split))
    checkpoint = through_a_file({"model": interrupted.state_dict(), "optimizer": optimizer.state_dict()})
    del interrupted

    torch.manual_seed(77)  # another process: other initial weights, another random queue
    resumed = make(**options)
    resumed.load_state_dict(checkpoint["model"])
    optimizer = make_optimizer(resumed)
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert resumed.steps == split
    assert first + train(resumed, optimizer, range(split, 20)) == losses
    assert resumed.steps == straight.steps == 20
    for name, value in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_loading_into_a_model_that_has_trained_already() -> None:
    moco = make()
    optimizer = make_optimizer(moco)
    train(moco, optimizer, range(3))
    saved = copy.deepcopy({"model": moco.state_dict(), "optimizer": optimizer.state_dict()})
    losses = train(moco, optimizer, range(3, 8))
    moco(batch(99)).backward()  # staged, and never part of a step
    optimizer.zero_grad()
    pointers = [p.data_ptr() for p in (*moco.parameters(), moco.queue.keys)]
    moco.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert pointers == [p.data_ptr() for p in (*moco.parameters(), moco.queue.keys)]
    assert train(moco, optimizer, range(3, 8)) == losses


def test_state_is_tensors_under_names_that_do_not_change() -> None:
    state = make(batch_norm=True, learnable_temperature=True).state_dict()
    assert all(isinstance(value, Tensor) for value in state.values())
    assert {"queue.keys", "queue.ptr", "queue.filled", "queue.skipped", "steps", "log_temperature"} <= set(state)
    assert {name.split(".")[0] for name in state} == {
        "query_encoder",
        "key_encoder",
        "queue",
        "steps",
        "log_temperature",
    }


def test_a_state_dict_is_a_view_of_the_living_model_as_with_any_module() -> None:
    # Frameworks save asynchronously only after a copy of their own; loading one's own state changes nothing.
    moco = make()
    train(moco, make_optimizer(moco), range(3))
    before = copy.deepcopy(moco.state_dict())
    moco.load_state_dict(moco.state_dict())
    assert all(torch.equal(value, moco.state_dict()[name]) for name, value in before.items())


def test_checkpoint_with_another_queue_size() -> None:
    saved = make(queue_size=50)
    train(saved, make_optimizer(saved), range(4))  # 36 keys
    state = through_a_file(saved.state_dict())
    with pytest.raises(RuntimeError, match=r"(?s)queue.*50.*20.*keep_newest"):
        make(queue_size=20).load_state_dict(state)
    for size in (20, 36, 90):
        resized = make(queue_size=size, queue_resize="keep_newest")
        resized.load_state_dict(state)
        assert torch.equal(resized.queue.ordered(), saved.queue.ordered()[-size:])
        train(resized, make_optimizer(resized), range(4, 6))
        assert resized.steps == 6


def test_checkpoint_of_another_library_without_our_extras_is_named_as_incomplete() -> None:
    moco = make()
    state = {name: value for name, value in moco.state_dict().items() if name != "steps" and "queue" not in name}
    with pytest.raises(RuntimeError, match=r"(?s)Missing.*steps.*queue\.keys"):
        moco.load_state_dict(state)
    missing, unexpected = moco.load_state_dict(state, strict=False)
    assert set(missing) == {"steps", "queue.keys", "queue.ptr", "queue.filled", "queue.skipped"}
    assert not unexpected


def test_unexpected_entries_are_reported() -> None:
    moco = make()
    for extra in ("queue.nonsense", "nonsense"):
        with pytest.raises(RuntimeError, match=rf"(?s)Unexpected.*{extra}"):
            moco.load_state_dict({**moco.state_dict(), extra: torch.zeros(1)})


@pytest.mark.parametrize("whole", [True, False])
def test_weights_loaded_into_the_query_encoder_reach_the_key_encoder(whole: bool) -> None:
    moco, pretrained = make(batch_norm=True), small_backbone(batch_norm=True)
    with torch.no_grad():
        pretrained(torch.randn(50, 3, 2, 2))  # batch statistics worth copying
    if whole:
        moco.query_encoder.backbone.load_state_dict(pretrained.state_dict())
    else:
        nn.init.constant_(moco.query_encoder.projector[0].weight, 0.1)
    assert any(
        not torch.equal(a, b)
        for a, b in zip(moco.query_encoder.parameters(), moco.key_encoder.parameters(), strict=True)
    )
    moco.eval()  # buffers as they are at the start, not after the first batch
    moco.train()
    seen: list[list[Tensor]] = []
    handle = moco.key_encoder.register_forward_pre_hook(
        lambda module, args: seen.append([value.clone() for value in module.state_dict().values()])
    )
    query = [value.clone() for value in moco.query_encoder.state_dict().values()]
    train(moco, make_optimizer(moco), range(1))
    handle.remove()
    if whole:  # by then the query's own batch has been seen; weights are what counts
        names = [name for name, _ in moco.query_encoder.named_parameters()]
        state = dict(zip(moco.query_encoder.state_dict(), query, strict=True))
        key = dict(zip(moco.key_encoder.state_dict(), seen[0], strict=True))
        assert all(torch.equal(state[name], key[name]) for name in names)
        assert torch.equal(key["backbone.2.running_mean"], pretrained[2].running_mean)
    else:
        assert all(torch.equal(a, b) for a, b in zip(query, seen[0], strict=True))


def test_key_encoder_is_not_made_equal_again_after_a_resume() -> None:
    moco = make()
    train(moco, make_optimizer(moco), range(5))
    other = make()
    other.load_state_dict(moco.state_dict())
    key = [p.clone() for p in other.key_encoder.parameters()]
    other(batch(5))
    assert all(torch.equal(a, b) for a, b in zip(key, other.key_encoder.parameters(), strict=True))
    assert any(
        not torch.equal(a, b)
        for a, b in zip(other.query_encoder.parameters(), other.key_encoder.parameters(), strict=True)
    )


def test_a_checkpoint_between_two_parts_of_a_step_resumes_at_the_last_step() -> None:
    moco = make()
    optimizer = make_optimizer(moco)
    train(moco, optimizer, range(3))
    moco(batch(3)).backward()  # the first part of an accumulated step
    saved = through_a_file({"model": moco.state_dict(), "optimizer": optimizer.state_dict()})
    other = make()
    other.load_state_dict(saved["model"])
    assert other.steps == 3
    assert int(other.queue.filled) == 27
    optimizer = make_optimizer(other)
    optimizer.load_state_dict(saved["optimizer"])
    train(other, optimizer, range(3, 4))
    assert int(other.queue.filled) == 36


def test_loading_with_assign_keeps_the_pairing_of_the_encoders() -> None:
    moco, other = make(), make()
    train(moco, make_optimizer(moco), range(3))
    other.load_state_dict(copy.deepcopy(moco.state_dict()), assign=True)
    expected = train(moco, torch.optim.SGD(moco.parameters(), 0.1), range(3, 6))
    assert train(other, torch.optim.SGD(other.parameters(), 0.1), range(3, 6)) == expected
    assert all(not p.requires_grad for p in other.key_encoder.parameters())
