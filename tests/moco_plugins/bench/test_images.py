"""A folder of one's own images through the harness: notes, damage, groups, classes, and what is said of bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from moco_plugins import hookimpl
from moco_plugins.bench.plan.data import FolderOptions, load_data
from moco_plugins.bench.plan.errors import SettingsError
from moco_plugins.bench.run.by_class import by_class
from moco_plugins.cli import main
from moco_plugins.data import image_folder as folders
from moco_plugins.data.arrays import ImageArray
from moco_plugins.data.splits import train_test
from moco_plugins.evaluation import Probe
from moco_plugins.hooks import manager as plugins


def fill(folder: Path, bright: bool, count: int, first: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(first, first + count):
        low, high = (128, 256) if bright else (0, 128)
        pixels = np.random.default_rng([seed, bright]).integers(low, high, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{seed}.png")


def command(folder: Path, out: Path, *more: str) -> list[str]:
    return [
        *("bench", "--data", str(folder), "--methods", "moco-v2", "--backbone", "convnet", "--epochs", "1"),
        *(
            "--batch-size",
            "16",
            "--image-size",
            "12",
            "--progress",
            "quiet",
            "--out",
            str(out),
            "-o",
            "queue_size=16",
            *more,
        ),
    ]


@pytest.mark.slow
def test_a_folder_with_copies_groups_and_damage_goes_through_the_harness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "READ_UP_TO", 5)
    for part, first in (("train", 0), ("test", 100)):
        for name in ("day", "night"):
            fill(tmp_path / "data" / part / name, name == "day", 16, first)
    for file in (tmp_path / "data" / "train" / "day" / "3.png", tmp_path / "data" / "test" / "night" / "103.png"):
        file.write_bytes(file.read_bytes()[:200])
    fill(tmp_path / "data" / "unlabeled", True, 8, 500)
    with pytest.warns(UserWarning, match="cannot be read and is left out"):
        assert main(command(tmp_path / "data", tmp_path / "out")) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    (run,) = results["runs"]
    assert [Path(file).name for file in results["data"]["damaged"]] == ["103.png", "3.png"]
    assert results["data"]["pretraining_images"] == 40
    assert run["images_seen"] == 32  # two steps of 16
    assert 0 <= run["linear_balanced"] <= 1
    assert 0 <= run["linear_auroc"] <= 1
    assert [(row["class"], row["images"]) for row in run["by_class"]] == [("day", 16), ("night", 15)]
    assert np.sum(run["confusion"]) == 31
    page = (tmp_path / "out" / "report.html").read_text()
    assert "2 images were damaged and left out when met" in page
    assert "What is taken for what" in page
    assert "<th scope=row>night</th>" in page
    assert main(command(tmp_path / "data", tmp_path / "out")) == 0  # finished: what was met is not forgotten
    assert json.loads((tmp_path / "out" / "results.json").read_text())["data"]["damaged"] == results["data"]["damaged"]


def test_what_a_reader_should_know_of_a_folder_is_in_the_notes(tmp_path: Path) -> None:
    for name in ("day", "night"):
        fill(tmp_path / name, name == "day", 16)
    fill(tmp_path / ".ipynb_checkpoints", True, 2)
    shutil.copy(tmp_path / "day" / "1.png", tmp_path / "day" / "1 (copy).png")
    data = load_data(str(tmp_path), None, None, 5)
    notes = " ".join(data.notes)
    assert "1 of 33 images are exact copies" in notes
    assert "2 images in hidden files and folders are left out" in notes
    assert data.labelled


def test_sets_whose_images_have_several_labels_are_judged_by_mean_average_precision() -> None:
    class Several:
        @staticmethod
        @hookimpl
        def moco_datasets() -> dict[str, Any]:
            images = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8)
            labels = torch.randint(0, 2, (40, 3))
            return {"several": lambda root: train_test(ImageArray(images, labels))}

    plugins.register(Several, "several")
    try:
        data = load_data("several", None, None, 5)
    finally:
        plugins.unregister("several")
    assert data.labelled
    assert data.measure == "map"
    assert "mean average precision (mAP)" in data.notes[0]


def several(folder: Path) -> None:
    """Noise with a bright left half, a bright top half, both or none, and a table that says so."""
    lines = []
    for part, count in (("train", 48), ("test", 24)):
        (folder / part).mkdir(parents=True)
        for seed in range(count):
            pixels = np.random.default_rng([seed, count]).integers(0, 128, (12, 12, 3), dtype=np.uint8)
            left, top = seed % 2, seed // 2 % 2
            pixels[:, :6] += np.uint8(60 * left)
            pixels[:6] += np.uint8(60 * top)
            Image.fromarray(pixels).save(folder / part / f"{seed}.png")
            lines.append(f"{part}/{seed}.png,{left},{top}")
    (folder / "labels.csv").write_text("\n".join(["image,left,top", *lines]))


@pytest.mark.slow
def test_a_folder_with_a_table_of_several_labels_is_judged_and_reported_by_mean_average_precision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several(tmp_path / "data")
    assert main(command(tmp_path / "data", tmp_path / "out")) == 0
    assert "kNN mAP %" in capsys.readouterr().out
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    (record,) = results["runs"]
    assert results["data"]["classes"] == ["left", "top"]
    assert not [name for name in record if name.endswith("top1") or "top1_" in name]
    raw = next(one for one in results["baselines"] if one["label"] == "raw-pixels")
    assert raw["linear_map"] > 0.9
    assert 0 < record["knn_map"] <= 1
    assert [row["class"] for row in record["by_class"]] == ["left", "top"]
    assert record["curve"][-1]["val_knn_map"] > 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "linear mAP %" in page
    assert "Best kNN mAP: " in page
    assert "average precision %" in page
    assert "kNN %" not in page
    assert "kNN accuracy" not in page


def test_options_of_folders_need_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--groups: data='digits' is not a folder"):
        load_data("digits", None, None, 5, FolderOptions(groups="1"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--groups", "GROUPS"], "misses 31 of 32 images, such as"),
        (["--groups", "4"], "in no folder of that depth"),
        (["--channels", "0"], "channels=0 must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("day", "night"):
        fill(tmp_path / "data" / name, name == "day", 16)
    (tmp_path / "groups.csv").write_text("day/1.png,a\n")
    more = [str(tmp_path / "groups.csv") if part == "GROUPS" else part for part in more]
    assert main(command(tmp_path / "data", tmp_path / "out", *more)) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_without_images_is_one_sentence_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(command(tmp_path / "empty", tmp_path / "out")) == 2
    told = capsys.readouterr().err
    assert "no image (" in told
    assert str(tmp_path / "empty") in told
    assert len(told.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_classes_without_training_images_are_left_out_of_the_table() -> None:
    logits = torch.tensor([[2.0, 1.0], [2.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    found: dict[str, Any] = by_class(Probe(logits, torch.tensor([0, 1, 1, -1]), torch.tensor([4, 9]), 1.0), ["a"] * 5)
    assert [(row["class"], row["images"], row["recall"]) for row in found["by_class"]] == [("a", 1, 1.0), ("9", 2, 0.5)]
    assert found["confusion"] == [[1, 0], [1, 1]]
    assert found["linear_balanced"] == 0.75
