from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moco_plugins import cli
from moco_plugins.bench import arguments
from moco_plugins.bench import main as bench_main

QUICK = ["--data", "digits", "--epochs", "1", "--batch-size", "512", "--backbone", "convnet"]


def test_literals_and_pairs() -> None:
    texts = ["momentum=0.99", "a=true", "b=None", "c=v2+", "d=(1, 2)", "e=x=y"]
    expected = {"momentum": 0.99, "a": True, "b": None, "c": "v2+", "d": (1, 2), "e": "x=y"}
    assert arguments.pairs(texts, "--option") == expected
    with pytest.raises(ValueError, match="--option 'momentum'"):
        arguments.pairs(["momentum"], "--option")


def test_bench_prints_the_table_and_says_where_everything_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "bench",
        *QUICK,
        "--methods",
        "moco-v2",
        "--out",
        str(tmp_path),
        "-o",
        "temperature=0.3",
        "--progress",
        "json",
    ]
    assert cli.main([*arguments, "-o", "moco-v2.momentum=0.9"]) == 0
    captured = capsys.readouterr()
    assert "moco-v2" in captured.out
    assert "raw-pixels" in captured.out
    assert str(tmp_path / "report.html") in captured.out
    events = [json.loads(line) for line in captured.err.splitlines() if line.startswith("{")]
    assert [event["event"] for event in events] == ["start", "epoch", "end"]
    assert 0 < events[1]["val_knn_top1"] <= 1
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["runs"][0]["options"]["temperature"] == 0.3
    assert content["runs"][0]["options"]["momentum"] == 0.9
    assert content["commands"][0].startswith("moco-plugins bench --data digits")
    # the report alone, again
    (tmp_path / "report.html").unlink()
    assert cli.main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["bench", "--methods", "mocov2"],
            "method='mocov2' is not known. Did you mean moco-v2? There are (plugin in brackets): ",
        ),
        (["bench", "--data", "/nowhere/at/all"], "data='/nowhere/at/all': there is no such folder"),
        (["bench", "--engine", "keras"], "engine='keras' is not known"),
        (["bench", "--backbone", "resnet81"], "Did you mean resnet18"),
        (["bench", "--data", "cifar10", "--data-root", "/nowhere"], "download=True"),
        (["bench", "-o", "momentum"], "--option 'momentum': write it as NAME=VALUE"),
        (["bench", "-o", "no_such=1"], "option 'no_such': moco-v2 has not got it, it has"),
        (["bench", "-o", "vicreg.x=1"], "'vicreg' is not among --methods"),
        (["report", "/nowhere"], "no results.json in /nowhere"),
        (["report", "a", "b"], "several folders need --out"),
        (["train", "--framework", "keras", "x.py"], "--framework 'keras'"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith(f"moco-plugins {arguments[0]}: ")
    assert len(error.strip().splitlines()) == 1
    assert not list(tmp_path.glob("bench/runs/*"))


def test_low_momentum_in_an_option_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", *QUICK, "--methods", "moco-v2", "--out", str(tmp_path), "-o", "momentum=0.001"]
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.count("fraction of the key encoder that is kept") == 1
    assert not (tmp_path / "runs").exists()  # said before anything runs


def test_missing_extra_gives_the_pip_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_main, "_NEEDED", ("sklearn", "surely_not_installed"))
    assert cli.main(["bench"]) == 2
    error = capsys.readouterr().err
    assert 'surely_not_installed: pip install "moco-plugins[bench]"' in error


def test_plugins_lists_who_provides_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plugins"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("builtin  (moco-plugins 0.1.0)")
    for part in ("moco-v2, moco-v2+", "mnist5k", "simclr", "lightning", "moco_build_queue", "info_nce", "affine"):
        assert part in text


def test_train_goes_to_the_adapter_with_all_its_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("mmengine")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--help"])
    assert stopped.value.code == 0
    assert "--resume" in capsys.readouterr().out


def test_module_and_help() -> None:
    shown = subprocess.run([sys.executable, "-m", "moco_plugins", "--help"], capture_output=True, text=True, check=True)
    for name in ("bench", "train", "plugins", "speed", "report"):
        assert name in shown.stdout


def test_interrupt_has_a_status_of_its_own(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_main, "carry_out", stop)
    assert cli.main(["bench", *QUICK, "--methods", "moco-v2", "--out", str(tmp_path)]) == 130
    assert "the same command continues" in capsys.readouterr().err
