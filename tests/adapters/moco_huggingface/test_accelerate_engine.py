"""What is Accelerate's own in the engine `accelerate`; what all engines must do is in test_every_adapter.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import build, differing, job_of, loader_of, train
from ranks import Ranks
from torch import nn
from torch.utils.data import DataLoader

from moco_plugins.steps import distributed

accelerate = pytest.importorskip("accelerate")


def test_an_epoch_ends_with_a_step_as_with_prepared_loaders(tmp_path: Path) -> None:
    method = build()
    steps, outcome = train(
        "accelerate",
        tmp_path,
        method,
        loader=loader_of(batch_size=32),  # 5 batches: windows of 2, 2 and 1
        options={"gradient_accumulation_steps": 2},
    )
    assert outcome.steps == method.steps == method.total_steps == 6
    assert [step for step, _ in steps] == [1, 2, 3, 4, 5, 6]
    assert int(method.queue.filled) == 100  # type: ignore[union-attr,arg-type]


def test_options_are_those_of_the_accelerator(tmp_path: Path) -> None:
    """As any other: here torch's compiler, by Accelerate's name for it."""
    method, plain = build(), build()
    train("accelerate", tmp_path / "a", method, options={"dynamo_backend": "eager"}, epochs=1)
    train("accelerate", tmp_path / "b", plain, epochs=1)
    assert differing(method, plain) == []
    with pytest.raises(TypeError, match="wheels"):
        train("accelerate", tmp_path / "c", build(), options={"wheels": 4})


def test_an_accelerator_of_the_user_stays_as_it_was(tmp_path: Path) -> None:
    theirs = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=3)
    try:
        seen = []
        method = build()
        method.query_encoder.backbone[-1].register_forward_hook(lambda m, i, output: seen.append(output.dtype))  # type: ignore[union-attr,index,operator]
        train("accelerate", tmp_path, method, epochs=1)
        assert set(seen) == {torch.float32}
        assert (theirs.mixed_precision, theirs.gradient_accumulation_steps) == ("bf16", 3)
        assert accelerate.Accelerator().mixed_precision == "bf16"
    finally:
        for state in (accelerate.state.AcceleratorState, accelerate.state.PartialState, accelerate.state.GradientState):
            state._shared_state.clear()


def test_what_cannot_be_done_is_said_with_the_argument(tmp_path: Path) -> None:
    for changes, said in (
        ({"device": "abacus"}, "device='abacus' must be auto, cpu"),
        ({"device": "cuda:1", "devices": 2}, "devices=2"),
        ({"device": "cuda"}, "device='cuda': torch finds no CUDA device"),
        ({"num_nodes": 2}, "num_nodes=2.*torchrun --nnodes=2"),
        ({"precision": "16-mixed"}, "precision='16-mixed' on cpu"),
        ({"precision": "64"}, "precision='64'"),
    ):
        if "cuda" in str(changes.get("device")) and "devices" not in changes and torch.cuda.is_available():
            continue
        with pytest.raises(ValueError, match=said):
            train("accelerate", tmp_path, build(), **changes)  # type: ignore[arg-type]


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: Any) -> None:
    for precision in ("32", "bf16-mixed"):
        train("accelerate", tmp_path / precision, build(), precision=precision)
    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn] == []


def test_a_step_that_the_loss_scaler_skips_moves_nothing(tmp_path: Path) -> None:
    """As float16 has it on GPUs; torch's scaler works on the CPU, too."""
    from moco_huggingface.engine import _Run, _state_of_its_own

    method: Any = build()
    told: list[tuple[int, int]] = []
    scales: list[float] = []

    def overflow(grad: torch.Tensor) -> torch.Tensor:
        scales.append(accelerator.scaler.get_scale())
        return grad * float("inf") if len(scales) == 3 else grad

    next(method.query_encoder.parameters()).register_hook(overflow)
    with _state_of_its_own():
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        run = _Run(job_of(tmp_path, method, on_step=lambda step, loss: told.append((step, method.steps))), accelerator)
        run.train()
    assert told == [(step, step) for step in range(1, 8)]  # one of eight was skipped
    assert run.scheduler is not None
    assert run.scheduler.last_epoch == 7
    assert scales == [8.0] * 3 + [4.0] * 5
    assert torch.load(tmp_path / "last.pt")["scaler"]["scale"] == 4.0
    assert all(value.isfinite().all() for value in method.state_dict().values())


class Killed(Exception):
    pass


def train_with_a_plain_loader(folder: Path) -> tuple[list[Any], list[bool], int]:
    rank, world = str(distributed.rank()), str(distributed.world_size())
    os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank)
    images = loader_of().dataset.images.images.float() / 255  # type: ignore[attr-defined]
    items = [([image, image.flip(-1)], number) for number, image in enumerate(images)]
    seen: list[Any] = []

    def make() -> nn.Module:
        method = build(dropout=0.5)  # each process draws its own
        method.register_forward_pre_hook(lambda module, given: seen.append(given[0][0].flatten(1).clone()))
        return method

    def job(method: nn.Module, name: str, **changes: Any) -> int:
        loader = DataLoader(items, 20, shuffle=True)
        return train("accelerate", folder / name, method, loader=loader, devices=2, **changes)[1].steps

    def die(epoch: int) -> None:
        if epoch == 2:
            raise Killed

    whole, again = make(), make()
    steps = job(whole, "whole", epochs=3)
    shown = [view.clone() for view in seen]
    with pytest.raises((Killed, RuntimeError)):
        job(make(), "cut", epochs=3, on_epoch=die)
    torch.manual_seed(123)
    job(again, "cut", epochs=3)
    names = [name for name in differing(whole, again) if "running" not in name]
    return shown, [not names], steps


def test_a_plain_loader_is_shared_out_and_resumed(two_ranks: Ranks, tmp_path: Path) -> None:
    (first, same, steps), (second, same_there, _) = two_ranks.run(train_with_a_plain_loader, tmp_path)
    assert steps == 12  # 160 images, 2 processes, 20 images each, 3 epochs
    assert same == same_there == [True]
    for epoch in range(3):
        parts = [view for shown in (first, second) for view in shown[4 * epoch : 4 * epoch + 4]]
        assert len(torch.cat(parts).unique(dim=0)) == 160  # each image once
    assert not torch.equal(first[0], first[4])  # shuffled anew
