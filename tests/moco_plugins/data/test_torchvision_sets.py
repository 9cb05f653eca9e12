"""torchvision's data sets by name, read by torchvision itself from files in their own formats, made here of a few images."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets

from moco_plugins.bench.plan.data import load_data
from moco_plugins.data.datasets import DATASETS, ROOT_VARIABLE
from moco_plugins.data.splits import to_learn_from

Array = np.ndarray[Any, Any]


def _images(count: int, *shape: int) -> Array:
    return np.random.default_rng(count).integers(0, 255, (count, *shape), dtype=np.uint8)


def _write(path: Path, content: bytes) -> str:
    """Write a file and return the checksum that torchvision compares."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return hashlib.md5(content).hexdigest()


def _idx(array: Array) -> bytes:
    head = (0x800 + array.ndim).to_bytes(4, "big")
    return head + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


@pytest.mark.parametrize(
    ("name", "kind"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST"), ("kmnist", "KMNIST")]
)
def test_idx_files(name: str, kind: str, tmp_path: Path) -> None:
    pixels = {"train": _images(6, 28, 28), "t10k": _images(3, 28, 28)}
    for part, images in pixels.items():
        _write(tmp_path / kind / "raw" / f"{part}-images-idx3-ubyte", _idx(images))
        _write(tmp_path / kind / "raw" / f"{part}-labels-idx1-ubyte", _idx(np.arange(len(images), dtype=np.uint8)))
    train, test = DATASETS[name](tmp_path)
    assert torch.equal(train.images, torch.from_numpy(pixels["train"])[:, None])
    assert torch.equal(test.images, torch.from_numpy(pixels["t10k"])[:, None])
    assert test.labels.tolist() == [0, 1, 2]
    assert len(train.classes) == 10
    assert train.whole is None  # it has a split of its own


@pytest.mark.parametrize(("name", "key"), [("cifar10", "labels"), ("cifar100", "fine_labels")])
def test_cifar(name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = getattr(datasets, name.upper())
    pixels = {"train": _images(5, 3072), "test": _images(3, 3072)}
    for part, images in pixels.items():
        content = pickle.dumps({"data": images, key: list(range(len(images)))})
        checksum = _write(tmp_path / kind.base_folder / part, content)
        monkeypatch.setattr(kind, f"{part}_list", [[part, checksum]])
    meta = pickle.dumps({kind.meta["key"]: [f"class {i}" for i in range(10)]})
    checksum = _write(tmp_path / kind.base_folder / "meta", meta)
    monkeypatch.setattr(kind, "meta", {**kind.meta, "filename": "meta", "md5": checksum})
    train, test = DATASETS[name](tmp_path)
    assert torch.equal(train.images, torch.from_numpy(pixels["train"]).view(5, 3, 32, 32))
    assert (test.labels.tolist(), test.classes[2]) == ([0, 1, 2], "class 2")


def test_stl10_learns_from_its_unlabelled_images_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = {part: _images(count, 3, 96, 96) for part, count in (("train", 12), ("unlabeled", 30), ("test", 10))}
    lists: dict[str, list[list[str]]] = {"train_list": [], "test_list": []}
    for part, images in pixels.items():
        where = lists["test_list" if part == "test" else "train_list"]
        checksum = _write(tmp_path / "stl10_binary" / f"{part}_X.bin", images.transpose(0, 1, 3, 2).tobytes())
        where.append([f"{part}_X.bin", checksum])
        if part != "unlabeled":
            labels = 1 + np.arange(len(images), dtype=np.uint8) % 2
            where.append([f"{part}_y.bin", _write(tmp_path / "stl10_binary" / f"{part}_y.bin", labels.tobytes())])
    _write(tmp_path / "stl10_binary" / "class_names.txt", b"cat\ndog\n")
    for name, files in lists.items():
        monkeypatch.setattr(datasets.STL10, name, files)
    train, test = DATASETS["stl10"](tmp_path)
    assert torch.equal(train.images, torch.from_numpy(pixels["train"]))
    assert torch.equal(test.images, torch.from_numpy(pixels["test"]))
    assert (train.labels.tolist()[:2], test.labels.tolist()[:2], train.classes) == ([0, 1], [0, 1], ("cat", "dog"))
    everything = to_learn_from(train)
    assert torch.equal(everything.images, torch.from_numpy(np.concatenate([pixels["train"], pixels["unlabeled"]])))
    data = load_data("stl10", str(tmp_path), None, 5)
    assert (len(data.train), len(data.pretrain), data.labelled, data.image_size) == (12, 42, True, 96)


def test_svhn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.io import savemat

    pixels = {"train": _images(4, 32, 32, 3), "test": _images(2, 32, 32, 3)}
    files = {}
    for part, images in pixels.items():
        path = tmp_path / f"{part}.mat"
        savemat(path, {"X": images.transpose(1, 2, 3, 0), "y": np.arange(len(images), dtype=np.uint8)[:, None]})
        files[part] = ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(datasets.SVHN, "split_list", files)
    train, test = DATASETS["svhn"](tmp_path)
    assert torch.equal(train.images, torch.from_numpy(pixels["train"].transpose(0, 3, 1, 2).copy()))
    assert test.labels.tolist() == [0, 1]


def test_imagenette(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part, count in (("train", 8), ("val", 3)):
        for name in ("n01440764", "n02102040"):
            folder = tmp_path / "imagenette2-160" / part / name
            folder.mkdir(parents=True)
            for i, image in enumerate(_images(count, 20, 30, 3)):
                Image.fromarray(image).save(folder / f"{i}.JPEG")
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path))
    train, test = DATASETS["imagenette"](None)
    assert (len(train), len(test), train.channels, train.image_size) == (16, 6, 3, 20)
    assert train.labels.bincount().tolist() == [8, 8]
