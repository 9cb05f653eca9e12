from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from moco_plugins import cli
from moco_plugins.bench.report.export import export
from moco_plugins.bench.report.findings import verdicts, warnings
from moco_plugins.bench.report.ranks import draw_ranks, rank
from moco_plugins.bench.report.table import rows

LINES = {"moco-v2": 0.60, "a_b": 0.55, "c": 0.50, "d": 0.45}


def _content(seeds: int = 5, engines: tuple[str, ...] = ("lightning",)) -> dict[str, object]:
    runs = [
        {"method": label, "label": label, "engine": engine, "seed": seed, "status": "finished", "epochs": 3,
         "knn_top1": value + 0.01 * ((seed * 7) % 3), "linear_top1": value + 0.1, "seconds": 1234.0,
         "losses": [[1, 1.0]], "options": {}}
        for engine in engines for label, value in LINES.items() for seed in range(seeds)
    ]  # fmt: skip
    base = [{"method": "untrained", "label": "untrained", "seed": 0, "knn_top1": 0.52, "linear_top1": 0.3}]
    return {"runs": runs, "baselines": base, "settings": {"epochs": 3}, "data": {"name": "x"}}


def test_csv_has_mean_and_interval_of_every_score() -> None:
    lines = list(csv.DictReader(io.StringIO(export(_content(), "csv"))))
    assert [line["label"] for line in lines] == ["moco-v2", "a_b", "c", "d", "untrained"]
    assert float(lines[0]["knn_top1_mean"]) == pytest.approx(0.6 + 0.01 * (0 + 1 + 2 + 0 + 1) / 5)
    assert float(lines[0]["knn_top1_low"]) < float(lines[0]["knn_top1_mean"]) < float(lines[0]["knn_top1_high"])
    assert float(lines[0]["seconds_mean"]) == 1234
    assert lines[-1]["knn_top1_std"] == ""  # one seed has no spread


def test_markdown_and_latex_show_the_best_bold() -> None:
    markdown = export(_content(), "markdown").splitlines()
    assert markdown[0] == "| method | seeds | kNN % | linear % | train s |"  # nothing of what nobody measured
    assert markdown[2] == "| moco-v2 | 5 | **60.8 ± 0.8** | **70.0 ± 0.0** | 1 234 |"
    latex = export(_content(), "latex")
    assert r"moco-v2 & 5 & \textbf{60.8 $\pm$ 0.8} & \textbf{70.0 $\pm$ 0.0} & 1\,234 \\" in latex
    assert r"a\_b &" in latex
    assert latex.count("&") == 6 * 4
    with pytest.raises(ValueError, match=r"format='pdf': there are csv, markdown, latex"):
        export(_content(), "pdf")


def test_report_prints_the_format_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results.json").write_text(json.dumps(_content()))
    assert cli.main(["report", str(tmp_path), "--format", "markdown"]) == 0
    assert capsys.readouterr().out == export(_content(), "markdown")
    assert not (tmp_path / "report.html").exists()


def test_ranks_are_demsars() -> None:
    found = rank(rows(_content()), "knn_top1")
    assert found is not None
    assert dict(found.ranks) == {"moco-v2": 1, "a_b": 2, "c": 3, "d": 4}
    assert found.critical == pytest.approx(2.569 * (4 * 5 / (6 * 5)) ** 0.5, abs=1e-3)  # Demšar 2006, table 5
    assert found.p < 0.01
    assert found.groups() == [["moco-v2", "a_b", "c"], ["a_b", "c", "d"]]
    assert rank(rows(_content(seeds=4)), "knn_top1") is None


def test_a_method_that_lacks_a_seed_is_left_out_of_the_ranks(tmp_path: Path) -> None:
    content = _content()
    extra = [{**run, "method": "e", "label": "e"} for run in content["runs"][:4]]  # type: ignore[index]
    content["runs"] = [*content["runs"], *extra]  # type: ignore[misc]
    table = rows(content)
    found = rank(table, "knn_top1")
    assert found is not None
    assert found.left_out == ("e",)
    picture = draw_ranks(table, "knn_top1", {}, tmp_path)
    assert picture is not None
    assert "Left out, for want of a seed: e." in picture.caption
    assert (tmp_path / "ranks.svg").read_text().count("moco-v2") >= 1  # letters stay letters


def test_a_sentence_names_a_method_once() -> None:
    content = _content(engines=("lightning", "mmengine"))
    (below,) = [sentence for sentence in warnings(content) if "below" in sentence]
    assert below == "c and d stay below the kNN accuracy of untrained (52.0 %)."
    content["runs"] = [run for run in content["runs"] if (run["label"], run["engine"]) != ("d", "mmengine")]  # type: ignore[attr-defined,index]
    for run in content["runs"]:  # type: ignore[attr-defined]
        if (run["label"], run["engine"]) == ("c", "mmengine"):
            run["knn_top1"] = 0.9
    (below,) = [sentence for sentence in warnings(content) if "below" in sentence]
    assert below == "c (lightning) and d stay below the kNN accuracy of untrained (52.0 %)."


def test_seeds_with_which_the_same_happened_share_a_sentence() -> None:
    content = _content(engines=("lightning", "mmengine"))
    said = verdicts(content, "knn_top1", None)
    assert [
        line for line in said if line.startswith("moco-v2, seeds 0, 1, 2, 3 and 4: lightning and mmengine give exactly")
    ]
    for run in content["runs"][:3]:  # type: ignore[index]
        run.update(status="failed", error="NonFiniteLossError: nan")
    assert "moco-v2, seeds 0, 1 and 2, failed: NonFiniteLossError: nan" in warnings(content)
