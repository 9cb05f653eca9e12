"""The engine `lightning`: equal to a plain loop, resumes bit-identically, leaves what is not its own alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from moco_plugins import MoCo
from moco_plugins.core.views import AffineViews
from moco_plugins.data.loader import make_loader
from moco_plugins.hooks import manager as plugins
from moco_plugins.hooks.engine import TrainingJob
from moco_plugins.steps import distributed

METHODS = ["moco-v2", "byol", "simclr"]


@pytest.fixture(scope="module")
def digits():
    train, _ = plugins.dataset_factory("digits")(None)
    return train.subset(torch.arange(160))


def build(name: str, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(128, 16)
    )
    options = {"projection_dim": 8, "hidden_dim": 16}
    if name == "moco-v2":
        options |= {"queue_size": 100, "momentum": 0.9}
    return plugins.method_factory(name)(backbone, 16, **options)


def make_job(method: nn.Module, loader, folder: Path, epochs: int = 2, **changes) -> TrainingJob:
    return TrainingJob(
        method=method,
        loader=loader,
        epochs=epochs,
        make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), 1e-2),
        make_scheduler=lambda o, total: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=total),
        folder=folder,
        device="cpu",
        **changes,
    )


def train(job: TrainingJob):
    engine = plugins.adapter("lightning").engine
    assert engine is not None
    return engine(job)


def same(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("name", METHODS)
def test_equals_a_plain_loop(name, digits, tmp_path):
    losses, epochs = [], []
    loader = make_loader(digits, AffineViews(), lambda x: x, 40, 0)
    trained = build(name)
    outcome = train(
        make_job(trained, loader, tmp_path, on_step=lambda s, loss: losses.append((s, loss)), on_epoch=epochs.append)
    )
    assert (outcome.steps, outcome.steps_now, epochs) == (8, 8, [1, 2])

    plain = build(name)
    plain.total_steps = 8
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
    expected = []
    for epoch in range(2):
        loader.batch_sampler.set_epoch(epoch)
        for views, _ in loader:
            loss = plain(views)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            expected.append((len(expected) + 1, loss.item()))
    assert losses == expected
    assert same(trained, plain)


class Noisy(TensorDataset):
    """Two noisy copies of an image, from the global random numbers: a loader with no seeding of its own."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return [image + 0.1 * torch.randn_like(image) for _ in range(2)], label


@pytest.mark.parametrize("kind", ["seeded", "plain"])
@pytest.mark.parametrize("name", METHODS)
def test_resume_is_bit_identical(name, kind, digits, tmp_path):
    def loader():
        if kind == "seeded":
            return make_loader(digits, AffineViews(), lambda x: x, 40, 0)
        return DataLoader(Noisy(digits.images.float() / 255, digits.labels), 40, shuffle=True)

    def stop_after(last):
        def on_epoch(epoch):
            torch.rand(3)  # an evaluation may draw random numbers, and be unlike in the resumed run
            if epoch == last:
                raise Stop

        return on_epoch

    class Stop(Exception):
        pass

    whole, losses = build(name), []
    train(make_job(whole, loader(), tmp_path / "whole", 3, on_step=lambda s, loss: losses.append(loss)))

    first, again, steps = build(name), build(name), []
    with pytest.raises(Stop):
        # Killed during the evaluation after epoch 2: epoch 1 is on disk.
        train(make_job(first, loader(), tmp_path / "parts", 3, on_epoch=stop_after(2)))
    torch.manual_seed(123)
    outcome = train(make_job(again, loader(), tmp_path / "parts", 3, on_step=lambda s, loss: steps.append((s, loss))))
    assert (outcome.steps, outcome.steps_now) == (12, 8)
    assert steps == list(enumerate(losses, 1))[4:]
    assert same(whole, again)


def test_a_finished_job_is_loaded_and_not_trained(digits, tmp_path):
    loader = make_loader(digits, AffineViews(), lambda x: x, 40, 0)
    done, again, epochs = build("moco-v2"), build("moco-v2"), []
    train(make_job(done, loader, tmp_path))
    outcome = train(make_job(again, loader, tmp_path, on_epoch=epochs.append))
    assert (outcome.steps, outcome.steps_now, epochs) == (8, 0, [])
    assert same(done, again)
    fresh = build("moco-v2")
    assert train(make_job(fresh, loader, tmp_path, resume=False)).steps_now == 8


def test_evaluation_in_eval_mode_does_not_change_the_training(digits, tmp_path):
    loader = make_loader(digits, AffineViews(), lambda x: x, 40, 0)
    plain, watched = build("moco-v2"), build("moco-v2")
    images = digits.images.float() / 255

    def look(epoch):
        watched.eval()
        with torch.no_grad():
            watched.embed(images)
            watched([images, images.flip(0)])

    train(make_job(plain, loader, tmp_path / "a"))
    train(make_job(watched, loader, tmp_path / "b", on_epoch=look))
    assert same(plain, watched)


def test_accumulation_reports_optimiser_steps(digits, tmp_path):
    loader = make_loader(digits, AffineViews(), lambda x: x, 32, 0)  # 5 batches: windows of 2, 2 and 1
    steps, method = [], build("moco-v2")
    outcome = train(
        make_job(
            method,
            loader,
            tmp_path,
            on_step=lambda s, loss: steps.append(s),
            options={"accumulate_grad_batches": 2},
        )
    )
    assert outcome.steps == method.steps == method.total_steps == 6
    assert steps == [1, 2, 3, 4, 5, 6]
    assert int(method.queue.filled) == 100


def test_options_are_those_of_the_trainer(digits, tmp_path):
    import pytorch_lightning as pl

    loader = make_loader(digits, AffineViews(), lambda x: x, 40, 0)
    options = {"logger": pl.loggers.CSVLogger(tmp_path / "logs"), "gradient_clip_val": 1e-9}
    method = build("moco-v2")
    before = [p.clone() for p in method.key_encoder.parameters()]
    job = make_job(method, loader, tmp_path / "job", precision="bf16", options=options)
    job.make_optimizer, job.make_scheduler = lambda m: torch.optim.SGD(m.parameters(), 0.1), None
    outcome = train(job)
    assert outcome.log_folder is not None
    assert outcome.log_folder.is_relative_to(tmp_path / "logs")
    for a, b in zip(before, method.key_encoder.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)  # clipped to nothing
    assert method.queue.keys.dtype == torch.float32


def test_errors_name_the_argument(digits, tmp_path):
    loader = make_loader(digits, AffineViews(), lambda x: x, 40, 0)
    job = make_job(build("simclr"), loader, tmp_path)
    job.device = "abacus"
    with pytest.raises(ValueError, match="device='abacus'"):
        train(job)
    job.device, job.devices = "cuda:1", 2
    with pytest.raises(ValueError, match="devices=2"):
        train(job)


def test_ctrl_c_arrives_as_keyboard_interrupt(digits, tmp_path):
    loader = make_loader(digits, AffineViews(), lambda x: x, 40, 0)

    def interrupt(step, loss):
        if step == 6:
            raise KeyboardInterrupt

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(make_job(build("moco-v2"), loader, tmp_path, on_step=interrupt))
    assert signal.getsignal(signal.SIGINT) is handler
    whole, resumed = build("moco-v2"), build("moco-v2")
    assert train(make_job(resumed, loader, tmp_path)).steps_now == 4
    train(make_job(whole, loader, tmp_path / "whole"))
    assert same(whole, resumed)


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


class FixedViews:
    """Views that are a function of the image, so that it does not matter who makes them."""

    batched = True

    def __call__(self, images):
        return images, images.flip(-1)


def train_on(devices: int, folder: Path) -> tuple[dict, list, list]:
    if devices > 1:
        os.environ["LOCAL_RANK"] = str(distributed.rank())  # Lightning then takes part in the group that is there
    train_set, _ = plugins.dataset_factory("digits")(None)
    loader = make_loader(train_set.subset(torch.arange(160)), FixedViews(), lambda x: x, 40, 0)
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    moco = MoCo(backbone, 16, "v2+", queue_size=70, projection_dim=8, momentum=0.9)
    steps, epochs = [], []
    train(
        make_job(moco, loader, folder, devices=devices, on_step=lambda s, loss: steps.append(s), on_epoch=epochs.append)
    )
    return moco.state_dict(), steps, epochs


def test_trains_on_two_processes_like_on_one(two_ranks, tmp_path):
    """The harness's loader shares each batch out; without BatchNorm the result is that of one process."""
    one, steps, epochs = train_on(1, tmp_path / "one")
    first, second = two_ranks.run(train_on, 2, tmp_path / "two")
    assert (steps, epochs) == (first[1], first[2]) == (list(range(1, 9)), [1, 2])
    assert (second[1], second[2]) == ([], [])  # callbacks are rank 0's
    for name, value in one.items():
        assert torch.equal(first[0][name], second[0][name]), name
        torch.testing.assert_close(first[0][name], value, atol=1e-5, rtol=1e-4, msg=name)


def train_with_a_plain_loader(folder: Path) -> tuple[dict, int]:
    os.environ["LOCAL_RANK"] = str(distributed.rank())
    digits, _ = plugins.dataset_factory("digits")(None)
    images = digits.images[:160].float() / 255
    items = [([image, image.flip(-1)], 0) for image in images]
    moco = build("moco-v2", dropout=0.0)
    outcome = train(make_job(moco, DataLoader(items, 20, shuffle=True), folder, epochs=1, devices=2))
    return {k: v for k, v in moco.state_dict().items() if "running" not in k}, outcome.steps


def test_a_plain_loader_is_shared_out_by_lightning(two_ranks, tmp_path):
    (first, steps), (second, _) = two_ranks.run(train_with_a_plain_loader, tmp_path)
    assert steps == 4  # 160 images, 2 processes, 20 images each
    assert int(first["queue.filled"]) == 100
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_moco_is_a_method_of_the_job(digits, tmp_path):
    """The very instance is trained, and knows the length of its training."""
    loader = make_loader(digits, AffineViews(), lambda x: x, 40, 0)
    moco = build("moco-v2")
    assert isinstance(moco, MoCo)
    before = [p.clone() for p in moco.key_encoder.parameters()]
    train(make_job(moco, loader, tmp_path, epochs=1))
    assert moco.total_steps == moco.steps == 4
    assert all(not torch.equal(a, b) for a, b in zip(before, moco.key_encoder.parameters(), strict=True))
