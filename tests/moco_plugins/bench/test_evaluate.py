"""Weights of anybody, judged without training anything: the command `moco-plugins evaluate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torchvision.models import resnet18

from moco_plugins import cli
from moco_plugins.backbones import build_backbone
from moco_plugins.bench.main import bench
from moco_plugins.bench.plan.settings import Settings
from moco_plugins.bench.results import Results
from moco_plugins.bench.run.judged import labels_of
from moco_plugins.bench.run.progress import Quiet

pytest.importorskip("safetensors")


def evaluate(*arguments: object) -> int:
    return cli.main(["evaluate", *map(str, arguments), "--progress", "quiet"])


def runs(folder: Path) -> dict[str, dict[str, float]]:
    return {record["label"]: record for record in json.loads((folder / "results.json").read_text())["runs"]}


def grey(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A colour network's weights for grey images."""
    return state | {"conv1.weight": state["conv1.weight"].sum(1, keepdim=True)}


def test_what_pretrain_and_bench_have_kept_scores_as_they_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["pretrain", "digits", "--epochs", "1", "--batch-size", "256", "--progress", "quiet", "--out"]
    assert cli.main([*given, str(tmp_path / "mine")]) == 0
    results = bench(Settings(methods=("simclr",), data="digits", epochs=1, batch_size=256), tmp_path / "b", Quiet())
    kept = tmp_path / "b" / "runs" / "simclr-seed0-lightning" / "backbone.pt"
    torch.manual_seed(0)
    torch.save(grey(resnet18().state_dict()), tmp_path / "theirs.pth")
    capsys.readouterr()
    out = tmp_path / "out"
    assert evaluate(tmp_path / "mine", kept, tmp_path / "theirs.pth", "--data", "digits", "--out", out) == 0
    found = runs(out)
    assert list(found) == ["mine", "simclr-seed0-lightning", "theirs"]
    mine, theirs = Results(tmp_path / "mine").runs[0], results.runs[0]
    for label, record in (("mine", mine), ("simclr-seed0-lightning", theirs)):
        for name in ("knn_top1", "linear_top1", "linear_top1_10pct", "linear_top1_1pct"):
            assert found[label][name] == record[name], (label, name)
    assert (found["theirs"]["backbone"], found["theirs"]["format"]) == ("resnet18", "torchvision")
    said = capsys.readouterr()
    assert "theirs: left out: fc.weight, fc.bias" in said.err  # a classifier is never dropped in silence
    assert [line.split()[0] for line in said.out.splitlines()[2:5]] == sorted(
        found, key=lambda x: -found[x]["knn_top1"]
    )
    page = (out / "report.html").read_text()
    assert "moco-plugins evaluate" in page
    assert "Nothing was trained but the probes" in page
    assert "What it cost" not in page
    assert "fine-tuned" not in page
    # an evaluation replaces another
    assert evaluate(tmp_path / "mine", "--data", "digits", "--finetune", 2, "--out", out) == 0
    assert list(runs(out)) == ["mine"]
    assert runs(out)["mine"]["finetune_top1"] > 0.7
    assert "fine-tuned" in (out / "report.html").read_text()


def test_the_normalisation_of_the_file_is_used(tmp_path: Path) -> None:
    backbone, _ = build_backbone("convnet", 1, 8)
    kept = {"state_dict": backbone.state_dict(), "backbone": "convnet", "channels": 1, "image_size": 8}
    for name, mean in (("a", 0.3), ("b", 30.0)):
        torch.save({**kept, "mean": [mean], "std": [0.4]}, tmp_path / f"{name}.pt")
    assert evaluate(tmp_path / "a.pt", tmp_path / "b.pt", "--data", "digits", "--out", tmp_path / "out") == 0
    found = runs(tmp_path / "out")
    assert found["a"]["uniformity"] != found["b"]["uniformity"]


def test_labels_are_short_where_they_can_be() -> None:
    assert labels_of(["a/run1/weights.safetensors", "b/run2"]) == ["run1", "run2"]
    assert labels_of(["x/moco.pth", "y/simclr.pth"]) == ["moco", "simclr"]
    assert labels_of(["x/moco.pth", "y/moco.pth"]) == ["x/moco.pth", "y/moco.pth"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("absent", "there is no such file"),
        ("colour", "takes images of 3 channels, and those of digits have 1"),
        ("strange", "fit no backbone that is known.*name what they are of with --backbone"),
        ("twice", "a file is named twice"),
        ("training", "holds results of a training; give another --out"),
    ],
)
def test_bad_input_is_one_sentence_and_writes_nothing(
    tmp_path: Path, what: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "w.pth", tmp_path / "out"
    backbone, _ = build_backbone("convnet", 1, 8)
    told = {"state_dict": backbone.state_dict(), "backbone": "convnet", "channels": 1, "image_size": 8}
    if what == "colour":
        torch.save(resnet18().state_dict(), path)
    elif what == "strange":
        torch.save({"net.weight": torch.zeros(3, 1, 3, 3)}, path)
    elif what != "absent":
        torch.save(told, path)
    if what == "training":
        bench(Settings(methods=("moco-v2",), data="digits", epochs=1, batch_size=512), out, Quiet())
    before = sorted(file.name for file in tmp_path.rglob("*"))
    capsys.readouterr()
    assert evaluate(path, *([path] if what == "twice" else []), "--data", "digits", "--out", out) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert line.startswith("moco-plugins evaluate: ")
    import re

    assert re.search(message, line)
    assert sorted(file.name for file in tmp_path.rglob("*")) == before


def test_learning_from_one_set_and_judging_on_another(tmp_path: Path) -> None:
    settings = Settings(
        methods=("moco-v2",), data="digits", evaluate_on="mnist5k", epochs=1, batch_size=512, image_size=8
    )
    results = bench(settings, tmp_path, Quiet())
    data = results.content["data"]
    assert (data["name"], data["learnt_from"]) == ("mnist5k", "digits")
    assert (data["pretraining_images"], data["train_images"]) == (1797, 4000)  # all images of the one, cut of the other
    assert results.runs[0]["knn_top1"] > 0.3
    assert results.runs[0]["images_seen"] == 512 * 3
