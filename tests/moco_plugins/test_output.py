"""Printing never raises, and the report is written before anything is printed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moco_plugins.bench.command import show
from moco_plugins.files import write_atomically
from moco_plugins.output import unfailing


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "latin-1"])
def test_letters_that_an_encoding_lacks_are_question_marks(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    stream = io.TextIOWrapper(shown, encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(UnicodeEncodeError):
        print("−1.2 ≥ 日本", flush=True)
    with unfailing():
        print("−1.2 ≥ 日本", flush=True)
        print("plain")
    assert sys.stdout is stream
    stream.flush()
    assert shown.getvalue().decode(encoding).splitlines() == ["?1.2 ? ??", "plain"]


def test_a_reader_that_has_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    closed = io.StringIO()
    closed.close()
    for stream in (Broken(), closed, None):
        monkeypatch.setattr(sys, "stdout", stream)
        with unfailing():
            print("something")
            print("more", flush=True)


def test_who_stops_reading_does_not_change_the_exit_status() -> None:
    command = [sys.executable, "-c", "import sys; from moco_plugins.cli import main; sys.exit(main(['plugins']))"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")


RUN = {"method": "größe", "label": "größe", "engine": "lightning", "epochs": 1, "status": "finished"}
RESULTS = {
    "settings": {},
    "baselines": [{"method": "raw-pixels", "label": "raw-pixels", "knn_top1": 0.938, "linear_top1": None, "seed": 0}],
    "runs": [{**RUN, "seed": seed, "knn_top1": top1} for seed, top1 in enumerate((0.9, 0.91))],
}


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_a_table_into_a_file_that_is_not_utf_8_ends_with_its_report(tmp_path: Path, encoding: str) -> None:
    """As on Windows, where output that goes into a file has the code page's encoding, and files have it by default."""
    given, out = tmp_path / "given", tmp_path / "größe ≥"
    given.mkdir()
    (given / "results.json").write_text(json.dumps(RESULTS), encoding="utf-8")
    command = [sys.executable, "-m", "moco_plugins", "report", str(given), "--out", str(out)]
    environment = {
        **os.environ,
        "PYTHONIOENCODING": encoding,
        "PYTHONUTF8": "0",
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
    }
    with (tmp_path / "shown.txt").open("wb") as shown:
        status = subprocess.run(
            command, env=environment, stdout=shown, stderr=subprocess.STDOUT, timeout=200
        ).returncode
    text = (tmp_path / "shown.txt").read_bytes().decode(encoding)
    assert status == 0, text
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "größe" in page
    assert "–" in page
    assert "raw-pixels" in text
    assert "Report:" in text


def test_the_report_is_there_before_anything_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "report.html"

    class Strict(io.StringIO):
        def write(self, text: str) -> int:
            assert written.exists()
            return super().write(text)

    (tmp_path / "results.json").write_text(json.dumps(RESULTS), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", Strict())
    assert show([tmp_path], tmp_path, "knn_top1", None) == written
    assert "raw-pixels" in sys.stdout.getvalue()  # type: ignore[attr-defined]


def test_a_page_with_a_command_line_that_is_no_unicode_is_written(tmp_path: Path) -> None:
    """A path with letters that the locale lacks arrives as surrogates, which UTF-8 has none for."""
    write_atomically(tmp_path / "report.html", "moco-plugins bench --out gr\udcc3\udcb6\udcc3\udc9fe")
    assert "--out gr" in (tmp_path / "report.html").read_text(encoding="utf-8")
