"""Files that are there whole or not at all, on full disks, too."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moco_plugins.files import is_full, replacing, write_atomically


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB, where one may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("no disk may be mounted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_the_old_file_stays_where_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def interrupted() -> None:
        with replacing(path) as partial:
            partial.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_full_disk_is_named_whoever_writes(small_disk: Path) -> None:
    path = small_disk / "weights.pt"
    with replacing(path) as partial:
        torch.save(torch.zeros(1000), partial)
    with pytest.raises(OSError, match="No space left") as caught, replacing(path) as partial:
        torch.save(torch.zeros(2**20), partial)
    assert is_full(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert torch.equal(torch.load(path), torch.zeros(1000))
    assert [file.name for file in small_disk.iterdir()] == ["weights.pt"]


def test_other_errors_are_not_those_of_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "absent" / "a") as partial:
        partial.write_text("x")
    assert not is_full(caught.value)
