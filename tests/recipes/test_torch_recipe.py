"""The recipe in plain torch: short, and it learns what it says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

RECIPE = Path(__file__).parents[2] / "recipes" / "torch" / "moco.py"


def test_learns(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(RECIPE), "--epochs", "4"])
    runpy.run_path(str(RECIPE), run_name="__main__")
    untrained, *epochs = (float(number) for number in re.findall(r"kNN accuracy (\d\.\d+)", capsys.readouterr().out))
    assert len(epochs) == 4
    assert untrained < 0.91
    assert epochs[-1] > 0.92


def test_is_short():
    assert len(RECIPE.read_text().splitlines()) <= 40
