"""Copies and groups stay on one side of a cut; damaged files are left out; lists are kept; unlabeled images are learnt from."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from moco_plugins.data import image_folder as folders
from moco_plugins.data import kept as kept_lists
from moco_plugins.data import telling
from moco_plugins.data.arrays import DataNotFoundError, ImageArray
from moco_plugins.data.grouping import copied, copies, grouped_split, joined, named_groups, numbered
from moco_plugins.data.image_files import ImageFiles
from moco_plugins.data.image_folder import image_folder
from moco_plugins.data.images import as_batch
from moco_plugins.data.loader import make_loader
from moco_plugins.data.splits import cut, to_learn_from, train_test
from moco_plugins.evaluation import extract_features


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (12, 12, 3), dtype=np.uint8))


def fill(folder: Path, seeds: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        picture(seed).save(folder / f"{seed}.png")


def spoil(file: Path) -> None:
    """Cut a file in half: its header is whole, its pixels are not."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def sides(train: ImageFiles, test: ImageFiles) -> dict[str, str]:
    return {file.name: side for side, part in (("train", train), ("test", test)) for file in part.files}


def test_copies_of_bytes_and_of_pixels_stay_on_one_side(tmp_path: Path) -> None:
    fill(tmp_path / "cat", range(20))
    fill(tmp_path / "dog", range(100, 120))
    for seed in range(8):
        shutil.copy(tmp_path / "cat" / f"{seed}.png", tmp_path / "cat" / f"copy of {seed}.png")
        picture(seed).save(tmp_path / "cat" / f"{seed}.bmp")  # other bytes, the same pixels
        picture(seed).convert("RGBA").convert("RGB").save(tmp_path / "cat" / f"{seed}-small.png", optimize=True)
    with pytest.warns(UserWarning, match=r"24 of 64 images are exact copies of others; copies stay on one side"):
        train, _test = image_folder(tmp_path)
    for seed in range(5):
        one, other = train_test(train.whole, seed)
        side = sides(one, other)
        for i in range(8):
            names = (f"{i}.png", f"copy of {i}.png", f"{i}.bmp", f"{i}-small.png")
            assert len({side[name] for name in names}) == 1
        assert 0.1 < len(other) / 64 < 0.3
        assert set(other.labels.tolist()) == {0, 1}  # type: ignore[union-attr]
    assert len({tuple(sorted(sides(*train_test(train.whole, seed)).items())) for seed in range(5)}) == 5


def test_arrays_are_cut_honestly_too() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40, 1, 6, 6), generator=generator, dtype=torch.uint8)
    whole = ImageArray(torch.cat([images, images[:30]]), torch.cat([torch.arange(40), torch.arange(30)]) % 2)
    for seed in range(5):
        train, test = train_test(whole, seed)
        assert not {i.numpy().tobytes() for i in train.images} & {i.numpy().tobytes() for i in test.images}
        assert len(train) + len(test) == 70
        assert 0.1 < len(test) / 70 < 0.3


def test_parts_of_a_cut_set_are_cut_honestly_too() -> None:
    images = torch.arange(30, dtype=torch.uint8).repeat_interleave(3).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    train, _ = train_test(ImageArray(images.contiguous(), torch.arange(90) // 3 % 2))
    for seed in range(5):
        kept, held = cut(train, train.labels, 0.2, seed)
        assert sorted([*kept.tolist(), *held.tolist()]) == list(range(len(train)))
        assert not set(train.images[kept].flatten().tolist()) & set(train.images[held].flatten().tolist())
        assert len(held) > 0


def test_without_copies_the_cut_is_as_it_always_was() -> None:
    images = torch.arange(300, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 2, 2)[:200].contiguous()
    labels = torch.arange(200) % 4
    train, test = train_test(ImageArray(images, labels), seed=3)
    held = []
    generator = torch.Generator().manual_seed(3)
    for number in range(4):
        own = (labels == number).nonzero()[:, 0]
        held.append(own[torch.randperm(50, generator=generator)][:10])
    assert test.images[:, 0, 0, 0].tolist() == torch.cat(held).sort().values.tolist()
    assert len(train) == 160


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 2)), min_size=20, max_size=120), st.integers(0, 99))
def test_no_group_is_ever_on_both_sides(rows: list[tuple[int, int]], seed: int) -> None:
    groups, labels = numbered(group for group, _ in rows), torch.tensor([label for _, label in rows])
    if len(torch.unique(groups)) < 2:
        return
    kept, held = grouped_split(labels, groups, 0.2, seed)
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(len(rows)))
    assert len(held) > 0
    assert len(kept) > 0
    assert not set(groups[kept].tolist()) & set(groups[held].tolist())


def test_groups_are_joined_where_they_touch() -> None:
    first, second = torch.tensor([0, 0, 1, 2, 3]), torch.tensor([5, 6, 6, 7, 7])
    assert joined(first, second).tolist() == [0, 0, 0, 1, 1]
    assert copied(copies(torch.zeros(4, 1, 2, 2, dtype=torch.uint8))) == 3


@pytest.mark.parametrize("given", ["2", "table.csv", "table.tsv"])
def test_groups_stay_on_one_side(given: str, tmp_path: Path) -> None:
    seed = 0
    for name in ("ill", "well"):
        for patient in range(10):
            fill(tmp_path / "data" / name / f"p{patient}", range(seed, seed := seed + 3))
    mark = "\t" if given.endswith("tsv") else ","
    files = sorted((tmp_path / "data").rglob("*.png"))
    lines = [f"{file.relative_to(tmp_path / 'data').as_posix()}{mark}{file.parent.name}" for file in files]
    (tmp_path / given).write_text("\n".join([f"file{mark}patient", *lines]), encoding="utf-8")
    path = given if given.isdigit() else str(tmp_path / given)
    with pytest.warns(UserWarning, match="of 10 groups"):
        train, _test = image_folder(tmp_path / "data", groups=path)
    for number in range(3):
        one, other = train_test(train.whole, number)
        assert not {f.parent.name for f in one.files} & {f.parent.name for f in other.files}
        assert len(other) == 12  # two patients of ten, each under both classes
    assert train.labels is not None


def test_a_table_that_misses_images_is_an_error_that_names_one(tmp_path: Path) -> None:
    fill(tmp_path / "cat", range(12))
    (tmp_path / "groups.csv").write_text("cat/0.png,a\ncat/1.png,b\n")
    with pytest.raises(ValueError, match=r"misses 10 of 12 images, such as cat/10\.png"):
        image_folder(tmp_path, groups=str(tmp_path / "groups.csv"))
    with pytest.raises(ValueError, match="there is no such file"):
        image_folder(tmp_path, groups=str(tmp_path / "nowhere.csv"))
    with pytest.raises(ValueError, match=r"12 of 12 images are in no folder of that depth"):
        image_folder(tmp_path, groups="2")
    with pytest.raises(ValueError, match="all images are of one group"):
        image_folder(tmp_path, groups="1")
    assert named_groups("1", ["cat/0.png", "dog/1.png"]) == ["cat", "dog"]


def test_a_split_of_ones_own_is_left_but_shared_groups_are_told(tmp_path: Path) -> None:
    for part, seeds in (("train", range(12)), ("test", range(20, 26))):
        fill(tmp_path / part / "cat" / "p1", seeds)
        fill(tmp_path / part / "dog" / f"{part}-p2", [seed + 50 for seed in seeds])
    with pytest.warns(UserWarning, match=r"1 groups have images in both train and test, such as p1"):
        train, test = image_folder(tmp_path, groups="2")
    assert (len(train), len(test)) == (24, 12)


@pytest.fixture
def split_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A set with a split of its own, so large that its files are not read when it is opened; two are damaged."""
    monkeypatch.setattr(folders, "READ_UP_TO", 5)
    for part, first in (("train", 0), ("test", 100)):
        for number, name in enumerate(("cat", "dog")):
            fill(tmp_path / part / name, range(first + 50 * number, first + 50 * number + 16))
    spoil(tmp_path / "train" / "cat" / "3.png")
    spoil(tmp_path / "test" / "dog" / "152.png")
    return tmp_path


def test_damaged_files_are_named_and_left_out_when_they_are_met(split_folder: Path) -> None:
    train, _test = image_folder(split_folder)
    assert (len(train), train.damaged) == (32, [])
    place = [file.name for file in train.files].index("3.png")
    with pytest.warns(UserWarning, match=r"cat/3\.png cannot be read and is left out"):
        image, label = train[place]
    after = train[place + 1]
    assert image.tobytes() == after[0].tobytes()
    assert (label, after[1]) == (-1, 0)  # it stands for no class
    assert train.damaged == [str(split_folder / "train" / "cat" / "3.png")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train[place]  # told once


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_goes_on_past_damaged_files_and_a_second_start_sees_the_same(split_folder: Path, workers: int) -> None:
    def run() -> tuple[list[torch.Tensor], list[str]]:
        train, _ = image_folder(split_folder)
        loader = make_loader(train, lambda image: (image_tensor(image),) * 2, lambda batch: batch, 8, 0, workers)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [first for (first, _), _ in loader], train.damaged

    (first, damaged), (second, _) = run(), run()
    assert damaged == [str(split_folder / "train" / "cat" / "3.png")]  # whichever process met it
    assert len(first) == 4
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def image_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_damaged_test_images_have_no_label_in_evaluation(split_folder: Path) -> None:
    _, test = image_folder(split_folder)
    with pytest.warns(UserWarning, match=r"152\.png"):
        _, labels = extract_features(torch.nn.Flatten(), test)
    assert labels.bincount(minlength=2).tolist() if int(labels.min()) >= 0 else (labels < 0).sum() == 1
    assert (labels == 1).sum() == 15


def test_where_no_image_can_be_read_that_is_said(tmp_path: Path) -> None:
    fill(tmp_path / "a", range(12))
    for file in (tmp_path / "a").iterdir():
        file.write_bytes(b"no image")
    with pytest.raises(DataNotFoundError, match="none of the 12 images"):
        image_folder(tmp_path)
    files = ImageFiles(sorted((tmp_path / "a").iterdir()), None, (), "RGB", 8, "a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(DataNotFoundError, match="none of the 12 images can be read"):
            files[0]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose fingerprints were taken."""
    found: list[str] = []
    take = kept_lists.fingerprint

    def counted(path: str) -> str:
        found.append(os.path.basename(path))
        return take(path)

    monkeypatch.setattr(kept_lists, "fingerprint", counted)
    return found


def test_a_list_is_kept_and_checked_by_names_sizes_and_times(tmp_path: Path, reads: list[str]) -> None:
    fill(tmp_path / "cat", range(12))
    first = image_folder(tmp_path)
    assert sorted(reads) == sorted(f"{i}.png" for i in range(12))
    reads.clear()
    second = image_folder(tmp_path)
    assert reads == []
    assert [part.files for part in first] == [part.files for part in second]
    spoil(tmp_path / "cat" / "4.png")
    (tmp_path / "cat" / "5.png").unlink()
    fill(tmp_path / "cat", [77, 78])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train, test = image_folder(tmp_path)
    assert sorted(reads) == ["4.png", "77.png", "78.png"]
    messages = " ".join(str(warning.message) for warning in told)
    assert "2 images have come, 1 have gone, 1 differ" in messages
    assert "1 of 13 images cannot be read and are left out: cat/4.png" in messages
    assert len(train) + len(test) == 12


def test_a_damaged_file_is_known_at_the_next_start(tmp_path: Path, reads: list[str]) -> None:
    fill(tmp_path, range(12))
    spoil(tmp_path / "4.png")
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"1 of 12 images cannot be read and are left out: 4\.png"):
            image_folder(tmp_path)
    assert len(reads) == 12


def test_a_list_that_cannot_be_kept_or_read_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "data", range(12))
    monkeypatch.setenv("MOCO_PLUGINS_CACHE", str(tmp_path / "data" / "0.png"))  # no folder
    assert len(image_folder(tmp_path / "data")[0]) == 10
    monkeypatch.setenv("MOCO_PLUGINS_CACHE", str(tmp_path / "cache"))
    image_folder(tmp_path / "data")
    (file,) = (tmp_path / "cache").iterdir()
    assert json.loads(file.read_text())["files"]
    file.write_text("{")
    assert len(image_folder(tmp_path / "data")[0]) == 10


def test_long_listings_tell_how_far_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "_PATIENCE", 0.0)
    fill(tmp_path / "cat", range(12))
    told: list[str] = []
    with telling.telling(told.append):
        image_folder(tmp_path)
    assert any(text.endswith(": 12") and text.startswith("listing images") for text in told)
    assert any("of 12" in text for text in told)


def test_large_sets_with_a_split_are_not_read_to_be_opened(
    split_folder: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    plain = Image.open
    monkeypatch.setattr(Image, "open", lambda path, *rest: opened.append(path) or plain(path, *rest))
    monkeypatch.setattr("moco_plugins.data.looking._LOOK_AT", 4)
    image_folder(split_folder)
    assert reads == []
    assert 0 < len(opened) <= 4


@pytest.mark.parametrize("name", ["unlabeled", "unlabelled"])
def test_unlabeled_images_beside_a_split_are_learnt_from(name: str, tmp_path: Path) -> None:
    for part, first in (("train", 0), ("test", 100)):
        for number, kind in enumerate(("cat", "dog")):
            fill(tmp_path / part / kind, range(first + 50 * number, first + 50 * number + 8))
    fill(tmp_path / name / "any" / "where", range(1000, 1030))
    train, test = image_folder(tmp_path)
    assert (len(train), len(test), train.classes) == (16, 16, ("cat", "dog"))
    learnt = to_learn_from(train)
    assert len(learnt) == 46
    assert learnt.labels.tolist() == [*[0] * 8, *[1] * 8, *[-1] * 30]
    assert to_learn_from(train) is learnt  # what it remembers of damage is not lost
    assert as_batch(learnt, [0, 45])[1].tolist() == [0, -1]


def test_unlabeled_images_beside_training_images_that_are_cut_here(tmp_path: Path) -> None:
    fill(tmp_path / "train" / "cat", range(10))
    fill(tmp_path / "train" / "dog", range(50, 60))
    fill(tmp_path / "unlabeled", range(1000, 1005))
    train, test = image_folder(tmp_path)
    assert (len(train), len(test), train.classes) == (16, 4, ("cat", "dog"))
    assert len(to_learn_from(train)) == 21
    again, _ = train_test(train.whole, 3)
    assert len(to_learn_from(again)) == 21


def test_unlabeled_copies_of_images_that_are_held_out_are_not_learnt_from(tmp_path: Path) -> None:
    fill(tmp_path / "train" / "cat", range(10))
    fill(tmp_path / "train" / "dog", range(50, 60))
    fill(tmp_path / "unlabeled", [*range(10), *range(50, 60), 1000])
    with pytest.warns(UserWarning, match="20 images without labels are copies of others"):
        train, _ = image_folder(tmp_path)
    for seed in (0, 3):
        learnt, test = train_test(train.whole, seed)
        assert len(to_learn_from(learnt)) == 16 + 16 + 1
        held = {Path(path).name for path in test.paths}
        assert len(held) == 4
        assert not held & {Path(path).name for path in learnt.unlabeled.paths}


def test_copies_in_a_split_that_comes_with_the_data_are_told_and_unlabeled_ones_left_out(tmp_path: Path) -> None:
    for part, first in (("train", 0), ("test", 6)):
        fill(tmp_path / part / "cat", range(first, first + 8))
        fill(tmp_path / part / "dog", range(first + 50, first + 58))
    fill(tmp_path / "unlabeled", [8, 9, 1000])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train, test = image_folder(tmp_path)
    said = " ".join(str(one.message) for one in caught)
    assert (len(train), len(test)) == (16, 16)
    assert "4 of 16 images of test are exact copies of images of train" in said
    assert "2 images without labels are exact copies of images of test" in said
    assert [Path(path).name for path in to_learn_from(train).paths[16:]] == [Path(train.unlabeled.paths[0]).name]


def test_copies_in_an_array_that_is_cut_here_are_told() -> None:
    images = torch.arange(20, dtype=torch.uint8).view(20, 1, 1, 1).expand(20, 1, 4, 4).clone()
    images[7] = images[3]
    with pytest.warns(UserWarning, match="1 of 20 images are exact copies of others"):
        train, test = train_test(ImageArray(images, torch.arange(20) % 2))
    values = [set(part.images[:, 0, 0, 0].tolist()) for part in (train, test)]
    assert not values[0] & values[1]


def test_a_folder_that_is_as_it_was_is_not_written_down_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "cat", range(12))
    first = image_folder(tmp_path)[0].paths
    monkeypatch.setattr(kept_lists.Kept, "save", lambda *_: pytest.fail("written again"))
    assert image_folder(tmp_path)[0].paths == first
