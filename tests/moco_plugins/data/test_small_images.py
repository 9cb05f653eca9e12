"""Folders of small images of one size are to the training what an array is: read once, and the same views."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from moco_plugins import TwoViews
from moco_plugins.data import small_images
from moco_plugins.data.arrays import ImageArray
from moco_plugins.data.image_files import ImageFiles
from moco_plugins.data.images import as_batch
from moco_plugins.data.loader import fitting_workers, make_loader
from moco_plugins.data.small_images import in_memory, kept, kind_of
from moco_plugins.data.telling import telling

COUNT, SIDES = 40, (12, 14)


def pixels_of(place: int, sides: tuple[int, int], mode: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    shape = (*sides, 3) if mode == "RGB" else sides
    return np.random.default_rng(place).integers(0, 256, shape, dtype=np.uint8)


def folder(path: Path, mode: str = "RGB", odd: int | None = None, sides: tuple[int, int] = SIDES) -> ImageFiles:
    """Images of one size, but for number ``odd``."""
    files = []
    for place in range(COUNT):
        files.append(path / f"{place:02}.png")
        here = (sides[0] + 1, sides[1]) if place == odd else sides
        Image.fromarray(pixels_of(place, here, mode)).save(files[-1])
    return ImageFiles(files, torch.arange(COUNT) % 3, "abc", mode, max(sides), "mine")


def array(mode: str = "RGB") -> ImageArray:
    images = torch.stack([torch.from_numpy(pixels_of(place, SIDES, mode)) for place in range(COUNT)])
    return ImageArray(images.permute(0, 3, 1, 2) if mode == "RGB" else images[:, None], torch.arange(COUNT) % 3)


def epoch(images: Any, views: Any = None, workers: int = 0) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    loader = make_loader(images, views or TwoViews("v2", 12), lambda batch: batch, 16, 0, workers)
    return [(list(made), labels) for made, labels in loader]


def assert_same(first: list[Any], second: list[Any]) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_views_of_a_folder_are_those_of_an_array(tmp_path: Path, mode: str) -> None:
    assert_same(epoch(folder(tmp_path, mode)), epoch(array(mode)))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_views_do_not_depend_on_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr(small_images, "AT_MOST", COUNT * 12 * 14 * 3 - 1)
    images = folder(tmp_path)
    assert in_memory(images) is None
    assert_same(epoch(images, workers=workers), epoch(array()))


def test_files_are_read_once(tmp_path: Path) -> None:
    images = folder(tmp_path)
    loader = make_loader(images, TwoViews("v2", 12), lambda batch: batch, 16, 0)
    for file in images.files:
        file.unlink()
    assert len(list(loader)) == 2
    assert in_memory(images) is in_memory(images)
    assert not images.damaged


def test_nothing_is_read_by_asking_what_is_kept(tmp_path: Path) -> None:
    images = folder(tmp_path)
    assert kept(images) is None
    before = as_batch(images, [3, 30])
    assert in_memory(images) is kept(images) is not None
    assert_same([as_batch(images, [3, 30])], [before])


@pytest.mark.parametrize("odd", [0, 17, COUNT - 1])
def test_images_of_other_sizes_are_cut_out_one_by_one(tmp_path: Path, odd: int) -> None:
    images = folder(tmp_path, odd=odd)
    assert in_memory(images) is None
    loader = make_loader(images, TwoViews("v2", 12), lambda batch: batch, COUNT, 0)
    (place,) = loader.batch_sampler
    (first, second), labels = loader.dataset.load(place)
    assert first.shape == second.shape == (COUNT, 3, 12, 12)
    assert first.dtype == torch.uint8
    assert labels.tolist() == [index % 3 for index in place]


def test_a_batch_that_turns_out_unlike_has_the_views_of_one_by_one(tmp_path: Path) -> None:
    images, views = folder(tmp_path, odd=17), TwoViews("v2", 12)
    loader = make_loader(images, views, lambda batch: batch, COUNT, 0)
    (place,) = loader.batch_sampler
    with loader.dataset._draws("views", place):
        expected = [torch.stack(half) for half in zip(*(views.crop(images[i][0]) for i in place), strict=True)]
    assert_same(list(loader.dataset.load(place)[0]), expected)


def test_views_of_single_images_are_given_single_images(tmp_path: Path) -> None:
    def views(image: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = torch.from_numpy(np.array(image)).float()
        return pixels, -pixels

    images = folder(tmp_path)
    ((first, _), _), *_ = epoch(images, views)
    assert first.shape == (16, 12, 14, 3)
    assert kept(images) is None, "they would be read for nothing"


def test_a_damaged_image_is_told_and_what_comes_for_it_has_no_label(tmp_path: Path) -> None:
    images = folder(tmp_path)
    images.files[5].write_bytes(b"no image")
    with pytest.warns(UserWarning, match=r"05\.png cannot be read and is left out"):
        found = in_memory(images)
    assert found is not None
    assert found.labels is not None
    assert found.labels.tolist() == [-1 if place == 5 else place % 3 for place in range(COUNT)]
    assert torch.equal(found.images[5], found.images[6])
    assert images.damaged == [str(images.files[5])]


@pytest.mark.parametrize(
    ("image", "small"),
    [
        (Image.new("RGB", (64, 64)), True),
        (Image.new("L", (64, 20)), True),
        (Image.new("RGB", (65, 20)), False),
        (Image.new("I;16", (8, 8)), False),
        (Image.new("P", (8, 8)), False),
        (torch.zeros(5, 64, 64), True),
        (torch.zeros(3, 65, 8), False),
        (torch.zeros(8, 8), False),
        ("no image", False),
    ],
)
def test_which_images_are_small(image: Any, small: bool) -> None:
    assert (kind_of(image) is not None) == small


def test_larger_images_are_not_kept(tmp_path: Path) -> None:
    assert in_memory(folder(tmp_path, sides=(65, 70))) is None


def test_folders_of_small_images_need_no_workers(tmp_path: Path) -> None:
    assert fitting_workers(folder(tmp_path), TwoViews("v2", 12)) == 0
    assert fitting_workers(folder(tmp_path), lambda image: (image, image)) > 0


def test_reading_many_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moco_plugins.data.telling._PATIENCE", 0.0)
    said: list[str] = []
    with telling(said.append):
        in_memory(folder(tmp_path))
    assert said
    assert "reading the small images of mine" in said[0]
