"""From a folder of images to weights that load: the command `moco-plugins pretrain`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.models import resnet18
from torchvision.transforms.functional import to_pil_image

from moco_plugins import cli
from moco_plugins.backbones import build_backbone
from moco_plugins.bench.plan.data import load_data
from moco_plugins.bench.plan.learning import to_pretrain_on
from moco_plugins.bench.results import Results
from moco_plugins.bench.run.recipe import Normalise
from moco_plugins.evaluation import extract_features, knn_accuracy

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 colour images of 16 pixels without classes: three kinds of gratings."""
    root = tmp_path_factory.mktemp("images")
    torch.manual_seed(0)
    wave = torch.sin(torch.arange(16) * 1.2)
    for i in range(120):
        kind = (wave[:, None].expand(16, 16), wave[None].expand(16, 16), wave[:, None] * wave[None])[i % 3]
        image = (0.5 + 0.4 * kind * torch.rand(3, 1, 1) + 0.05 * torch.randn(3, 16, 16)).clamp(0, 1)
        to_pil_image(image).save(root / f"{i:03}.png")
    return root


def run(*arguments: object) -> int:
    return cli.main(["pretrain", *map(str, arguments), "--progress", "quiet"])


@pytest.mark.parametrize("engine", ["lightning", "mmengine"])
def test_a_folder_without_labels_becomes_weights_and_a_page(
    folder: Path, tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--backbone", "resnet18", "--epochs", 2, "--engine", engine, "--out", tmp_path) == 0
    state = safetensors.load_file(tmp_path / "weights.safetensors")
    theirs = resnet18()
    theirs.fc = torch.nn.Identity()
    theirs.load_state_dict(state, strict=True)
    about = json.loads((tmp_path / "weights.json").read_text())
    assert (about["backbone"], about["channels"], about["image_size"]) == ("resnet18", 3, 16)
    assert about["made"]["data"] == {"name": folder.name, "images": 120}  # nothing has to be held out
    assert about["made"]["options"]["queue_size"] < 120
    page = (tmp_path / "report.html").read_text()
    for words in ("Is this normal?", "ln(K + 1)", "View pairs", "Nearest neighbours", "Map of the features"):
        assert words in page
    assert "framed where the class differs" not in page
    said = capsys.readouterr()
    assert "epoch 1 of 2: loss" in said.err
    assert f"Weights: {tmp_path / 'weights.safetensors'}" in said.out
    assert [path for path in tmp_path.rglob("*.p*t*") if path.suffix in (".pt", ".pth", ".ckpt")] == []
    assert run(folder, "--backbone", "resnet18", "--epochs", 2, "--engine", engine, "--out", tmp_path) == 0
    for name, value in safetensors.load_file(tmp_path / "weights.safetensors").items():
        assert torch.equal(value, state[name])


def test_labels_give_accuracies_of_the_weights_that_are_kept(tmp_path: Path) -> None:
    assert run("digits", "--epochs", 2, "--batch-size", 256, "--out", tmp_path) == 0
    (record,) = Results(tmp_path).runs
    about = json.loads((tmp_path / "weights.json").read_text())
    data = load_data("digits", None, None, 20)
    assert about["made"]["data"]["images"] == len(data.train)  # test images stay apart
    backbone, _ = build_backbone(about["backbone"], about["channels"], about["image_size"])
    backbone.load_state_dict(safetensors.load_file(tmp_path / "weights.safetensors"))
    finish = Normalise(about["mean"], about["std"])
    train, test = (extract_features(backbone, part, finish) for part in (data.train, data.test))
    assert knn_accuracy(*train, *test) == record["knn_top1"] == about["measured"]["knn_top1"]
    page = (tmp_path / "report.html").read_text()
    assert "before training" in page
    assert f"{100 * record['knn_top1']:.1f}" in page


def test_another_pretraining_starts_from_its_weights(folder: Path, tmp_path: Path) -> None:
    common = (folder, "--backbone", "convnet", "--epochs", 1)
    assert run(*common, "--out", tmp_path / "a") == 0
    first = safetensors.load_file(tmp_path / "a" / "weights.safetensors")
    slow = ("--learning-rate", 1e-12, "--weight-decay", 0, "--seed", 5, "--init", tmp_path / "a")
    assert run(*common, *slow, "--out", tmp_path / "b") == 0
    second = safetensors.load_file(tmp_path / "b" / "weights.safetensors")
    torch.testing.assert_close(second["0.weight"], first["0.weight"], rtol=0, atol=1e-6)
    assert json.loads((tmp_path / "b" / "weights.json").read_text())["made"]["init"] == str(tmp_path / "a")


def test_killed_within_an_epoch_it_ends_with_the_weights_of_a_whole_one(tmp_path: Path) -> None:
    given = [
        "digits",
        "--epochs",
        "2",
        "--batch-size",
        "32",
        "--checkpoint-minutes",
        "0",
        "--progress",
        "quiet",
        "--out",
    ]
    command = [sys.executable, "-m", "moco_plugins", "pretrain", *given]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert cli.main(["pretrain", *given, str(whole)]) == 0
    process = subprocess.Popen(
        [*command, str(cut)], stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    curve = cut / "runs" / "moco-v2-seed0-lightning" / "curve.json"
    until = time.monotonic() + 300  # starting takes a while on a busy machine
    while time.monotonic() < until and not (curve.exists() and len(json.loads(curve.read_text())["losses"]) > 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (cut / "weights.safetensors").exists()
    assert cli.main(["pretrain", *given, str(cut)]) == 0
    assert 0 < Results(cut).runs[0]["resumed_at_step"] < 44
    first, second = (safetensors.load_file(out / "weights.safetensors") for out in (whole, cut))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_of_very_many_images_a_part_is_judged_and_all_are_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    from moco_plugins.bench.plan import learning

    monkeypatch.setattr(learning, "BANK", 200)
    monkeypatch.setattr(learning, "QUERIES", 50)
    data = load_data("digits", None, None, 20)
    some = to_pretrain_on(data)
    assert (len(some.train), len(some.test), len(some.pretrain)) == (200, 50, len(data.train))
    assert len(torch.unique(some.train.labels)) == 10
    assert "Accuracy is measured with 200 of the" in some.notes[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--init", "nowhere.pt"], "nowhere.pt: there is no such file"),
        (["--init", __file__], "it is no checkpoint"),
        (["--method", "moco-v9"], "method='moco-v9' is not known"),
        (["--batch-size", "500"], "has only 120 images"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    folder: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "--backbone", "convnet", *arguments, "--out", tmp_path / "out") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert line.startswith("moco-plugins pretrain: ")
    assert message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["another", "channels", "safetensors"])
def test_weights_that_do_not_fit_are_said_with_what_they_are_of(
    folder: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path: Any = tmp_path / "w.pt"
    if kind == "another":
        torch.save({"state_dict": build_backbone("convnet")[0].state_dict(), "backbone": "convnet"}, path)
        expected = "do not fit backbone='resnet18'.*They are of convnet: --backbone convnet"
    elif kind == "channels":
        torch.save(resnet18().state_dict() | {"conv1.weight": torch.zeros(64, 1, 7, 7)}, path)
        expected = r"conv1.weight is .*it takes images of 1 channels"
    else:
        path = tmp_path / "w.safetensors"
        path.write_bytes(b"not this")
        expected = "w.safetensors: the file is damaged"
    assert run(folder, "--backbone", "resnet18", "--init", path, "--out", tmp_path / "out") == 2
    import re

    assert re.search(expected, capsys.readouterr().err)


@pytest.mark.parametrize("engine", ["lightning", "mmengine"])
def test_a_full_disk_is_one_sentence_and_nothing_is_half_written(
    tmp_path: Path, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no disk may be mounted here")
    try:
        assert run("digits", "--epochs", 1, "--batch-size", 512, "--engine", engine, "--out", disk / "out") == 2
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moco-plugins")]
        assert len(said) == 1
        assert "pretrain: the disk is full" in said[0]
        assert "the same command continues" in said[0]
        left = [file.name for file in (disk / "out").rglob("*") if file.suffix in (".pth", ".ckpt", ".partial", ".pt")]
        assert left == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_classifier_in_the_first_weights_is_left_out_aloud(folder: Path, tmp_path: Path, capsys: Any) -> None:
    torch.save(resnet18().state_dict(), tmp_path / "theirs.pth")
    given = ("--backbone", "resnet18", "--epochs", 1, "--init", tmp_path / "theirs.pth")
    assert run(folder, *given, "--out", tmp_path / "out") == 0
    assert "left out: fc.weight, fc.bias" in capsys.readouterr().err


def test_one_folder_is_one_pretraining(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("digits", "--epochs", 1, "--batch-size", 512, "--out", tmp_path)
    assert run(*common) == 0
    for changed, message in (
        (("-o", "queue_size=64"), "queue_size was 1024, now 64"),
        (("--seed", 1), "seed was 0, now 1"),
        (("--method", "simclr"), "method was 'moco-v2', now 'simclr'"),
        (("--epochs", 2), "epochs was 1, now 2"),
    ):
        capsys.readouterr()
        assert run(*common, *changed) == 2
        assert message in capsys.readouterr().err


def test_a_queue_as_large_as_the_set_is_warned_of(folder: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(folder, "--backbone", "convnet", "--epochs", 1, "-o", "queue_size=120", "--out", tmp_path) == 0
    said = "queue_size=120 is as large as the data set of 120 images or larger"
    assert said in capsys.readouterr().err
    assert said in (tmp_path / "report.html").read_text()
