"""The recipe in plain torch: short, and it learns what it says."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moco_plugins import datasets
from moco_plugins.data.arrays import ImageArray

RECIPE = Path(__file__).parents[2] / "recipes" / "torch" / "moco.py"


def test_learns(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(RECIPE), "--epochs", "4"])
    runpy.run_path(str(RECIPE), run_name="__main__")
    untrained, *epochs = (float(number) for number in re.findall(r"kNN accuracy (\d\.\d+)", capsys.readouterr().out))
    assert len(epochs) == 4
    assert untrained < 0.91
    assert epochs[-1] > 0.92


def test_runs_on_colour_images(monkeypatch, capsys):
    images = torch.randint(0, 256, (192, 3, 16, 16), dtype=torch.uint8)
    parts = [ImageArray(images, torch.arange(192) % 2), ImageArray(images[:50], torch.arange(50) % 2)]
    monkeypatch.setitem(datasets.DATASETS, "cifar10", lambda root: parts)
    monkeypatch.setattr("sys.argv", [str(RECIPE), "--data", "cifar10", "--epochs", "1"])
    runpy.run_path(str(RECIPE), run_name="__main__")
    assert len(re.findall(r"kNN accuracy (\d\.\d+)", capsys.readouterr().out)) == 2


@pytest.mark.parametrize("name", ["moco", "fabric", "torchrun"])
def test_is_short(name):
    assert len((RECIPE.parent / f"{name}.py").read_text().splitlines()) <= 40


def test_fabric_learns_in_bfloat16(monkeypatch, capsys):
    pytest.importorskip("lightning_fabric")
    recipe = RECIPE.parent / "fabric.py"
    monkeypatch.setattr("sys.argv", [str(recipe), "--epochs", "2", "--precision", "bf16-mixed"])
    runpy.run_path(str(recipe), run_name="__main__")
    first, last = re.findall(r"kNN accuracy (\d\.\d+)", capsys.readouterr().out)
    assert float(last) > max(0.9, float(first))


def test_torchrun_learns_on_two_processes():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [*torchrun, str(RECIPE.parent / "torchrun.py"), "--epochs", "2"],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    first, last = re.findall(r"kNN accuracy (\d\.\d+)", run.stdout)  # one process speaks
    assert float(last) > max(0.9, float(first)), run.stderr[-3000:]


@pytest.mark.parametrize(
    ("name", "epochs", "least"), [("tabular", 5, 0.92), ("image_text", 4, 0.7), ("sequence", 6, 0.68)]
)
def test_recipes_for_other_inputs_learn(name: str, epochs: int, least: float, monkeypatch, capsys) -> None:
    recipe = RECIPE.parent / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(recipe), "--epochs", str(epochs)])
    runpy.run_path(str(recipe), run_name="__main__")
    first, last = capsys.readouterr().out.strip().splitlines()
    untrained, trained = (float(re.findall(r"\d\.\d{3}", line)[-1]) for line in (first, last))
    assert trained > max(untrained, least)
