"""Tables of labels beside the images: their forms, and what is said of bad ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from moco_plugins.data.image_folder import image_folder

NAMES = [f"{part}/{number}.png" for part, count in (("train", 6), ("test", 4)) for number in range(count)]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number, name in enumerate(NAMES):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(tmp_path / name)
    return tmp_path


def table(folder: Path, *lines: str, name: str = "labels.csv") -> None:
    (folder / name).write_text("\n".join(lines), encoding="utf-8")


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_column_of_0_and_1_for_each_class(images: Path, mark: str) -> None:
    rows = [mark.join([name, str(i % 2), "yes" if i % 3 else ""]) for i, name in enumerate(NAMES)]
    table(images, mark.join(["image", "cat", "dog"]), *rows)
    train, test = image_folder(images)
    assert train.classes == ("cat", "dog")
    assert train.labels is not None
    assert test.labels is not None
    assert train.labels.tolist() == [[i % 2, int(i % 3 > 0)] for i in range(6)]
    assert test.labels.tolist() == [[i % 2, int(i % 3 > 0)] for i in range(6, 10)]
    assert train[1][1].tolist() == [1, 1]


def test_names_of_classes_with_a_bar_between_several(images: Path) -> None:
    table(images, *(f"{name},{'dog|cat' if i % 2 else 'cat'}" for i, name in enumerate(NAMES)))
    train, _ = image_folder(images)
    assert train.classes == ("cat", "dog")
    assert train.labels is not None
    assert train.labels.tolist() == [[1, i % 2] for i in range(6)]


def test_one_class_an_image_is_a_class_as_of_a_folder(images: Path) -> None:
    table(images, "image,class", *(f"{name},{'dog' if i % 2 else 'cat'}" for i, name in enumerate(NAMES)))
    train, test = image_folder(images)
    assert train.labels is not None
    assert train.labels.tolist() == [0, 1] * 3
    assert test[1][1] == 1


def test_a_table_for_each_part_and_names_without_suffix(images: Path) -> None:
    for part, count in (("train", 6), ("test", 4)):
        table(images / part, *(f"{number},{'a' if number % 2 else 'b'}" for number in range(count)))
    train, test = image_folder(images)
    assert train.labels is not None
    assert test.labels is not None
    assert (train.labels.tolist(), test.labels.tolist()) == ([1, 0] * 3, [1, 0] * 2)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["train/0.png,a", "train/1.png,b"], r"labels.csv misses 4 of 6 images, such as train/2.png"),
        (["image,a,b", "train/0.png,1"], "line 2 has 2 columns, and the headings 3"),
        (["image,a,b", "train/0.png,1,maybe"], "line 2 says 'maybe' where 0 or 1 is wanted"),
        (["train/0.png"], "has no second column"),
        ([], "has no second column"),
    ],
)
def test_bad_tables_are_named_with_a_cure(images: Path, lines: list[str], message: str) -> None:
    table(images, *lines)
    with pytest.raises(ValueError, match=message):
        image_folder(images)


def test_a_table_that_is_not_utf8_is_named(images: Path) -> None:
    (images / "labels.csv").write_bytes("train/0.png,Käfer".encode("latin-1"))
    with pytest.raises(ValueError, match="cannot be read as a table"):
        image_folder(images)
