"""What is Lightning's own in the engine `lightning`; what all engines must do is in test_every_adapter.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jobs
import pytest
import torch
from jobs import build, differing, loader_of
from torch.utils.data import DataLoader

from moco_plugins.hooks.engine import TrainingOutcome
from moco_plugins.steps import distributed


def train(folder, method, **changes) -> TrainingOutcome:
    return jobs.train("lightning", folder, method, **changes)[1]


def test_accumulation_reports_optimiser_steps(tmp_path):
    steps, method = [], build()
    outcome = train(
        tmp_path,
        method,
        loader=loader_of(batch_size=32),  # 5 batches: windows of 2, 2 and 1
        on_step=lambda s, loss: steps.append(s),
        options={"accumulate_grad_batches": 2},
    )
    assert outcome.steps == method.steps == method.total_steps == 6
    assert steps == [1, 2, 3, 4, 5, 6]
    assert int(method.queue.filled) == 100


def test_options_are_those_of_the_trainer(tmp_path):
    import pytorch_lightning as pl

    options = {"logger": pl.loggers.CSVLogger(tmp_path / "logs"), "gradient_clip_val": 1e-9}
    method = build()
    before = [p.clone() for p in method.key_encoder.parameters()]
    outcome = train(
        tmp_path / "job",
        method,
        precision="bf16",
        options=options,
        make_optimizer=lambda m: torch.optim.SGD(m.parameters(), 0.1),
        make_scheduler=None,
    )
    assert outcome.log_folder is not None
    assert outcome.log_folder.is_relative_to(tmp_path / "logs")
    for a, b in zip(before, method.key_encoder.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)  # clipped to nothing


def test_errors_name_the_argument(tmp_path):
    with pytest.raises(ValueError, match="device='abacus'"):
        train(tmp_path, build("simclr"), device="abacus")
    with pytest.raises(ValueError, match="devices=2"):
        train(tmp_path, build("simclr"), device="cuda:1", devices=2)


def test_ctrl_c_arrives_as_keyboard_interrupt(tmp_path):
    def interrupt(step, loss):
        if step == 6:
            raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, build(), on_step=interrupt)
    assert signal.getsignal(signal.SIGINT) is handler
    whole, resumed = build(), build()
    assert train(tmp_path, resumed).steps_now == 4
    train(tmp_path / "whole", whole)
    assert differing(whole, resumed) == []


def test_is_quiet(tmp_path):
    script = """
        import pathlib, sys, torch
        from torch import nn
        from moco_plugins import MoCo, plugins
        from moco_plugins.hooks.engine import TrainingJob
        torch.set_num_threads(1)
        data = [([torch.rand(8), torch.rand(8)], 0) for _ in range(32)]
        moco = MoCo(nn.Linear(8, 8), 8, queue_size=16, projection_dim=4)
        job = TrainingJob(moco, torch.utils.data.DataLoader(data, 8), 2, lambda m: torch.optim.SGD(m.parameters(), 0.1),
                          None, pathlib.Path(sys.argv[1]), device="cpu")
        for _ in range(2):
            assert plugins.adapter("lightning").engine(job).steps == 8
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def train_with_a_plain_loader(folder: Path) -> tuple[dict, int]:
    os.environ["LOCAL_RANK"] = str(distributed.rank())
    images = loader_of().dataset.images.images.float() / 255
    items = [([image, image.flip(-1)], 0) for image in images]
    moco = build(dropout=0.0)
    outcome = train(folder, moco, loader=DataLoader(items, 20, shuffle=True), epochs=1, devices=2)
    return {k: v for k, v in moco.state_dict().items() if "running" not in k}, outcome.steps


def test_a_plain_loader_is_shared_out_by_lightning(two_ranks, tmp_path):
    (first, steps), (second, _) = two_ranks.run(train_with_a_plain_loader, tmp_path)
    assert steps == 4  # 160 images, 2 processes, 20 images each
    assert int(first["queue.filled"]) == 100
    assert all(torch.equal(first[name], second[name]) for name in first)
