"""The recipes for lightly: each way of running them, on a part of the data; what they reach on all of it is in their text."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from moco_plugins.data import datasets
from moco_plugins.steps import distributed

FOLDER = Path(__file__).parents[2] / "recipes" / "lightly"
RECIPE, CONFIG = FOLDER / "moco.py", FOLDER / "moco_mnist5k.yaml"


@contextlib.contextmanager
def small_data(train: int, test: int):
    """Let the data sets by name have fewer images, and CIFAR-10 ones of our own making."""
    whole = datasets.DATASETS["mnist5k"](None)
    small = tuple(
        part.subset(torch.arange(0, len(part), len(part) // n)[:n])
        for part, n in zip(whole, (train, test), strict=True)
    )
    colour = tuple(
        datasets.ImageArray(part.images[:64].repeat(1, 3, 1, 1)[..., :32, :32], part.labels[:64], name="cifar10")
        for part in small
    )
    before = dict(datasets.DATASETS)
    datasets.DATASETS.update(mnist5k=lambda root: small, cifar10=lambda root: colour)
    try:
        yield
    finally:
        datasets.DATASETS.update(before)


def run_recipe(*arguments: str, train: int = 512) -> float:
    """Run the script with arguments; return the accuracy that it prints."""
    argv, folder, out = sys.argv, os.getcwd(), io.StringIO()
    sys.argv = [str(RECIPE), *arguments]
    other = sys.modules.pop("lightning.pytorch", None)  # a fresh process would have imported one Lightning only
    try:
        with contextlib.redirect_stdout(out), small_data(train, 256), tempfile.TemporaryDirectory() as scratch:
            os.chdir(scratch)
            runpy.run_path(str(RECIPE), run_name="__main__")
    finally:
        sys.argv = argv
        os.chdir(folder)
        if other is not None:
            sys.modules["lightning.pytorch"] = other
    found = re.findall(r"kNN accuracy (\d\.\d+)", out.getvalue())
    return float(found[0]) if found else -1.0


@pytest.mark.parametrize("way", [[], ["--loop"]], ids=["lightning", "loop"])
def test_runs(way):
    accuracy = run_recipe("--epochs", "2", *way)
    assert 0.4 < accuracy < 0.95  # an untrained network has 0.8 with so few images; eight epochs on all reach 0.93


def test_runs_on_cifar10():
    assert 0 <= run_recipe("--data", "cifar10", "--epochs", "1") <= 1


def distributed_run() -> float:
    os.environ["LOCAL_RANK"] = str(distributed.rank())  # Lightning joins the group that is there
    return run_recipe("--devices", "2", "--epochs", "1")


def test_runs_on_two_processes(two_ranks):
    first, second = two_ranks.run(distributed_run)
    assert 0.3 < first < 0.95
    assert second == -1.0  # only rank 0 prints


def test_is_short():
    assert len(RECIPE.read_text().splitlines()) <= 60


def test_lightning_cli(tmp_path, monkeypatch, capsys):
    from moco_lightly.__main__ import main

    monkeypatch.chdir(tmp_path)
    changes = ["--trainer.max_epochs=1", "--trainer.enable_progress_bar=false", "--model.hidden_dim=32"]
    with small_data(256, 128):
        main(["fit", "--config", str(CONFIG), *changes])
        (checkpoint,) = tmp_path.rglob("*.ckpt")
        main(["validate", "--config", str(CONFIG), *changes, "--ckpt_path", str(checkpoint)])
    assert "val_knn_top1" in capsys.readouterr().out
    state = torch.load(checkpoint, weights_only=True)
    assert state["hyper_parameters"]["hidden_dim"] == 32
    assert state["state_dict"]["moco.query_encoder.projector.0.weight"].shape == (32, 512)
