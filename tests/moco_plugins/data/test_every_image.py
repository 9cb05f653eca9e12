"""Every image a person has is read as its owner sees it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from moco_plugins import TwoViews
from moco_plugins.data.image_folder import image_folder
from moco_plugins.data.images import as_batch, as_float
from moco_plugins.data.opening import Reading, read_image


def noise(*shape: int, seed: int = 0, dtype: Any = np.uint8) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


def fill(folder: Path, count: int = 12, **changes: Any) -> None:
    """Write small colour images that all differ."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        seed = int.from_bytes(str(folder / str(i)).encode()[-6:], "big")
        Image.fromarray(noise(12, 12, 3, seed=seed)).save(folder / f"{i}.png", **changes)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(far from square|has changed).*")
        yield


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bit_grey_images_keep_their_values(suffix: str, tmp_path: Path) -> None:
    values = noise(32, 32, dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / f"deep.{suffix}")
    image = read_image(tmp_path / f"deep.{suffix}", Reading(channels=1, deep=True))
    assert image.shape == (1, 32, 32)
    assert len(torch.unique(image)) == len(np.unique(values)) > 1000
    torch.testing.assert_close(image[0], torch.from_numpy(values / 65535).float())


def test_big_endian_16_bit_images_keep_their_values(tmp_path: Path) -> None:
    values = noise(32, 32, dtype=np.uint16)
    Image.frombytes("I;16B", (32, 32), values.astype(">u2").tobytes()).save(tmp_path / "deep.tif")
    image = read_image(tmp_path / "deep.tif", Reading(channels=1, deep=True))
    torch.testing.assert_close(image[0], torch.from_numpy(values / 65535).float())


def test_a_folder_of_16_bit_images_is_read_and_seen_by_views(tmp_path: Path) -> None:
    for i in range(12):
        Image.fromarray(noise(16, 16, seed=i, dtype=np.uint16)).save(tmp_path / f"{i}.png")
    train, test = image_folder(tmp_path)
    batch, _ = as_batch(test, range(len(test)))
    assert (train.channels, batch.dtype) == (1, torch.float32)
    assert len(torch.unique(batch)) > 400
    assert 0.4 < float(batch.mean()) < 0.6
    first, second = TwoViews("v2", 16)(train[0][0])
    assert first.shape == second.shape == (1, 16, 16)
    assert train.statistics is not None  # their own, not those of photographs
    assert train.statistics[0][0] == pytest.approx(0.5, abs=0.05)


def test_floating_point_images_have_the_range_that_is_found_and_told(tmp_path: Path) -> None:
    for i in range(12):
        Image.fromarray(noise(16, 16, seed=i).astype(np.float32) * 10 - 500).save(tmp_path / f"{i}.tif")
    with pytest.warns(UserWarning, match=r"from -500 to 2050.*--value-range LOW,HIGH"):
        train, _ = image_folder(tmp_path)
    values = torch.cat([train[i][0].flatten() for i in range(len(train))])
    assert len(torch.unique(values)) > 200
    assert (float(values.min()), float(values.max())) == pytest.approx((0, 1), abs=0.01)


def test_floats_from_0_to_1_and_16_bits_in_32_are_as_they_are(tmp_path: Path) -> None:
    for folder, scale in (("float", 1 / 255), ("whole", 200)):
        (tmp_path / folder).mkdir()
        for i in range(12):
            values = noise(16, 16, seed=i).astype(int)
            array = (values * scale).astype(np.float32 if folder == "float" else np.int32)
            Image.fromarray(array).save(tmp_path / folder / f"{i}.tif")
        with pytest.warns(UserWarning, match=r"0 is black and (1|65535) white"):
            train, _ = image_folder(tmp_path / folder)
        place = int(train.files[3].stem)
        expected = noise(16, 16, seed=place) * (1 / 255 if folder == "float" else 200 / 65535)
        torch.testing.assert_close(train[3][0][0], torch.from_numpy(expected).float())


def test_the_range_of_values_can_be_given(tmp_path: Path) -> None:
    for i in range(12):
        Image.fromarray(noise(16, 16, seed=i, dtype=np.uint16) // 16).save(tmp_path / f"{i}.png")
    with pytest.warns(UserWarning, match=r"reach 409\d: they are dark; --value-range 0,409"):
        dark, _ = image_folder(tmp_path)
    assert float(as_float(dark[0][0]).max()) < 0.07
    train, _ = image_folder(tmp_path, value_range=(0, 4095))
    assert 0.95 < float(train[0][0].max()) <= 1
    assert len(torch.unique(train[0][0])) > 200


def test_nothing_is_clipped_in_silence(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 5000]], dtype=np.uint16)).save(tmp_path / "bright.png")
    with pytest.warns(UserWarning, match=r"bright\.png has values from 0 to 5000.*0 to 4095 is clipped"):
        image = read_image(tmp_path / "bright.png", Reading(channels=1, value_range=(0, 4095), deep=True))
    assert image.flatten().tolist() == [0, 1]


@pytest.mark.parametrize("hidden", [".ipynb_checkpoints", "__MACOSX", "@eaDir", ".git/objects"])
def test_hidden_parts_of_paths_are_left_out_and_counted(hidden: str, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        fill(tmp_path / name)
    fill(tmp_path / hidden, 3)
    fill(tmp_path / "cat" / hidden, 2)
    Image.new("RGB", (8, 8)).save(tmp_path / "dog" / "._0.png")
    with pytest.warns(UserWarning, match=r"6 images in hidden files and folders are left out"):
        train, test = image_folder(tmp_path)
    assert train.classes == ("cat", "dog")
    assert len(train) + len(test) == 24


def test_a_hidden_folder_above_the_data_hides_nothing(tmp_path: Path) -> None:
    fill(tmp_path / ".cache" / "data")
    train, test = image_folder(tmp_path / ".cache" / "data")
    assert len(train) + len(test) == 12


def test_links_are_followed_and_name_their_class(tmp_path: Path) -> None:
    fill(tmp_path / "elsewhere" / "n0001")
    fill(tmp_path / "data" / "dog")
    (tmp_path / "data" / "cat").symlink_to(tmp_path / "elsewhere" / "n0001", target_is_directory=True)
    Image.fromarray(noise(12, 12, 3, seed=99)).save(tmp_path / "one.png")
    (tmp_path / "data" / "dog" / "linked.png").symlink_to(tmp_path / "one.png")
    train, test = image_folder(tmp_path / "data")
    assert train.classes == ("cat", "dog")
    assert sum(part.labels.bincount(minlength=2) for part in (train, test)).tolist() == [12, 13]  # type: ignore[union-attr]


def test_a_loop_of_links_ends_and_no_folder_counts_twice(tmp_path: Path) -> None:
    for name, other in (("cat", "dog"), ("dog", "cat")):
        fill(tmp_path / name)
        (tmp_path / name / "up").symlink_to(tmp_path, target_is_directory=True)
        (tmp_path / name / "self").symlink_to(tmp_path / name, target_is_directory=True)
        (tmp_path / name / "other").symlink_to(tmp_path / other, target_is_directory=True)
    with pytest.warns(UserWarning, match=r"links to folders that are here already are left out: cat/other, cat/self"):
        train, test = image_folder(tmp_path)
    assert (len(train) + len(test), train.classes) == (24, ("cat", "dog"))


def rotated(folder: Path) -> Path:
    """A photograph that is taller than wide, its upper half white, as a phone writes it: lying, with a note."""
    upright = np.zeros((40, 24, 3), np.uint8)
    upright[:20] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.rot90(upright).copy()).save(folder / "phone.jpg", exif=exif, quality=95)
    return folder / "phone.jpg"


def test_photographs_stand_upright(tmp_path: Path) -> None:
    image = read_image(rotated(tmp_path), Reading())
    assert image.size == (24, 40)
    pixels = as_float(image)
    assert float(pixels[:, :18].mean()) > 0.95 > 0.05 > float(pixels[:, 22:].mean())


def test_the_mmengine_pipeline_opens_files_upright(tmp_path: Path) -> None:
    transforms = pytest.importorskip("moco_mmengine.transforms")
    assert transforms.image_of({"img_path": str(rotated(tmp_path))}).size == (24, 40)


def test_transparent_parts_are_white_unless_the_band_is_asked_for(tmp_path: Path) -> None:
    pixels = noise(12, 12, 4)
    pixels[..., 3] = np.where(np.arange(12) < 6, 0, 255)
    Image.fromarray(pixels, "RGBA").save(tmp_path / "seen.png")
    image = read_image(tmp_path / "seen.png", Reading())
    assert image.mode == "RGB"
    array = np.array(image)
    assert (array[:, :6] == 255).all()
    assert (array[:, 6:] == pixels[:, 6:, :3]).all()
    raw = read_image(tmp_path / "seen.png", Reading(channels=4))
    assert torch.equal(raw, torch.from_numpy(pixels).permute(2, 0, 1))


def test_a_folder_with_its_fourth_band(tmp_path: Path) -> None:
    for i in range(12):
        Image.fromarray(noise(12, 12, 4 if i else 3, seed=i)).save(tmp_path / f"{i}.png")
    train, _ = image_folder(tmp_path)
    assert (train.channels, train[0][0].mode) == (3, "RGB")
    train, test = image_folder(tmp_path, channels=4)
    batch = torch.stack([part[i][0] for part in (train, test) for i in range(len(part))])
    assert (batch.shape, batch.dtype) == ((12, 4, 12, 12), torch.uint8)
    assert int((batch[:, 3] == 255).flatten(1).all(1).sum()) == 1  # the image without the band is opaque
    assert train.statistics is not None
    assert len(train.statistics[0]) == 4


@pytest.mark.parametrize("shape", [(20, 24, 6), (6, 20, 24)])
def test_arrays_of_any_number_of_bands_have_their_own_statistics_and_no_colour_jitter(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    for i in range(12):
        np.save(tmp_path / f"{i}.npy", noise(*shape, seed=i, dtype=np.uint16) // 2)
    train, _ = image_folder(tmp_path)
    image = train[0][0]
    assert (train.channels, image.shape) == (6, (6, 20, 24))
    expected = np.load(train.files[0]) / 65535
    expected = expected if shape[0] == 6 else expected.transpose(2, 0, 1)
    torch.testing.assert_close(image, torch.from_numpy(expected).float())
    assert train.statistics is not None
    assert train.statistics[0] == pytest.approx([0.25] * 6, abs=0.02)
    flat = torch.full((6, 20, 24), 0.5)
    for view in TwoViews("v2", 16)(flat):
        torch.testing.assert_close(view, torch.full((6, 16, 16), 0.5))  # neither brighter nor of another colour


def test_multi_band_tiff(tmp_path: Path) -> None:
    tifffile = pytest.importorskip("tifffile")
    values = noise(5, 16, 16, dtype=np.uint16)
    tifffile.imwrite(tmp_path / "bands.tif", values, photometric="minisblack", planarconfig="separate")
    image = read_image(tmp_path / "bands.tif", Reading(channels=5, deep=True))
    torch.testing.assert_close(image, torch.from_numpy(values / 65535).float())


def test_bands_without_their_reader_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tifffile = pytest.importorskip("tifffile")
    tifffile.imwrite(
        tmp_path / "bands.tif", noise(5, 16, 16, dtype=np.uint16), photometric="minisblack", planarconfig="separate"
    )
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(ImportError, match=r"bands\.tif.*pip install"):
        read_image(tmp_path / "bands.tif", Reading(channels=5))


def test_palettes_cmyk_gif_webp_uppercase_and_unicode_names(tmp_path: Path) -> None:
    colour = Image.fromarray(np.tile(np.array([[200, 40, 90]], np.uint8), (16 * 16, 1)).reshape(16, 16, 3))
    written = {
        "palette.png": colour.convert("P", palette=Image.Palette.ADAPTIVE),
        "ink.JPG": colour.convert("CMYK"),
        "moving.GIF": colour,
        "net.WebP": colour,
        "éàü 图像.BMP": colour,
        "plain.TIFF": colour,
        "grey.PGM": colour.convert("L"),
    }
    for number, (name, image) in enumerate(written.items()):
        image.putpixel((0, 0), number)  # no copies
        image.save(tmp_path / name)
    fill(tmp_path, 5)
    train, test = image_folder(tmp_path)
    found = {file.name: part[i][0] for part in (train, test) for i, file in enumerate(part.files)}
    assert set(written) <= set(found)
    for name in written:
        red, green, blue = np.array(found[name])[8, 8].tolist()
        if name == "grey.PGM":
            assert red == green == blue
        else:
            assert (red, green, blue) == pytest.approx((200, 40, 90), abs=4), name


def test_transparent_palettes_are_white_where_they_are_transparent(tmp_path: Path) -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.paste(0, (0, 0, 4, 8))
    image.save(tmp_path / "logo.gif", transparency=0)
    array = np.array(read_image(tmp_path / "logo.gif", Reading()))
    assert array[4, 1].tolist() == [255, 255, 255]
    assert array[4, 6].tolist() == [10, 20, 30]


def test_tiny_images_and_others_are_brought_to_one_size(tmp_path: Path) -> None:
    for i, size in enumerate([(1, 1), (2, 3), (5, 1), (300, 7), (7, 300), (9, 9)] * 2):
        Image.fromarray(noise(*size, 3, seed=i)).save(tmp_path / f"{i}.png")
    train, _ = image_folder(tmp_path)
    assert train.image_size == 8  # the smallest that anything is trained at
    batch, _ = as_batch(train, range(len(train)), train.image_size)
    assert batch.shape[1:] == (3, 8, 8)
    for i in range(len(train)):
        assert TwoViews("v2", 8)(train[i][0])[0].shape == (3, 8, 8)


def test_images_that_are_not_square_are_kept_whole_where_a_height_and_width_is_given() -> None:
    wide = torch.zeros(3, 10, 40)
    wide[:, :, :4] = 1
    wide[:, :, -4:] = 1

    class One:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return wide, 0

    square, _ = as_batch(One(), [0], 10)
    whole, _ = as_batch(One(), [0], (5, 20))
    assert square.shape[2:] == (10, 10)
    assert float(square.sum()) == 0  # the middle alone
    assert whole.shape[2:] == (5, 20)
    assert float(whole[..., 0].mean()) > 0.9


def test_far_from_square_images_are_told(tmp_path: Path) -> None:
    for i in range(12):
        Image.fromarray(noise(10, 40, 3, seed=i)).save(tmp_path / f"{i}.png")
    with pytest.warns(UserWarning, match=r"10 x 40 pixels\).*--image-size HEIGHTxWIDTH, such as 10x40"):
        image_folder(tmp_path)
