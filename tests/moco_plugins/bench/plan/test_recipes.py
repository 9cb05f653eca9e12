from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moco_plugins.bench.main import bench
from moco_plugins.bench.plan.ablations import ABLATIONS
from moco_plugins.bench.plan.complete import complete
from moco_plugins.bench.plan.data import load_data
from moco_plugins.bench.plan.errors import MissingExtraError, SettingsError
from moco_plugins.bench.plan.recipes import recipe_of
from moco_plugins.bench.plan.runs import plan
from moco_plugins.bench.plan.settings import Settings
from moco_plugins.bench.report.page import write_report
from moco_plugins.bench.run.dictionaries import register_dictionaries
from moco_plugins.bench.run.optimise import make_optimizer, make_scheduler
from moco_plugins.bench.run.progress import Quiet
from moco_plugins.bench.run.tune import held_out, pick, plan_trials
from moco_plugins.core.lars import LARS

Make = Callable[..., Settings]


def _completed(small: Make, **changes: Any) -> Settings:
    register_dictionaries()
    settings = small(**changes)
    return complete(settings, load_data(settings.data, None, None, 20))


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD), ("lars", LARS)])
def test_optimisers_by_name_without_decay_on_biases(small: Make, name: str, kind: type) -> None:
    optimizer = make_optimizer(_completed(small, optimizer=name))(nn.Linear(3, 2))
    assert isinstance(optimizer, kind)
    assert [group["weight_decay"] > 0 for group in optimizer.param_groups] == [True, False]


def test_an_optimiser_has_a_rate_of_its_own_unless_one_is_given(small: Make) -> None:
    assert _completed(small, optimizer="sgd").learning_rate == pytest.approx(0.03 * 32 / 256)
    assert _completed(small, optimizer="sgd", learning_rate=0.5).learning_rate == 0.5
    with pytest.raises(SettingsError, match=r"--optimizer 'adam': there are adamw, sgd, lars"):
        _completed(small, optimizer="adam")


def test_the_common_recipe_is_what_it_was(small: Make) -> None:
    settings = _completed(small)
    assert (settings.optimizer, settings.learning_rate, settings.weight_decay) == ("adamw", pytest.approx(2e-3), 0.05)
    assert plan(settings)[0].recipe == {}


@pytest.mark.parametrize(
    ("schedule", "first", "half", "end"),
    [("cosine", 1.0, 0.5, 0.0), ("steps", 1.0, 1.0, 0.01), ("warm-up", 0.09, 0.587, 0.0)],
)
def test_schedules(small: Make, schedule: str, first: float, half: float, end: float) -> None:
    settings = small(learning_rate=1.0, schedule=schedule, optimizer="sgd", weight_decay=0.0)
    optimizer = make_optimizer(settings)(nn.Linear(1, 1))
    scheduler, rates = make_scheduler(settings)(optimizer, 100), []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert (rates[0], rates[50], rates[99]) == pytest.approx((first, half, end), abs=0.01)


def test_own_recipes_are_the_papers_scaled_to_the_batch(small: Make) -> None:
    settings = _completed(small, methods=("moco-v2", "byol"), recipe="own", batch_size=64)
    by = {run.method: run.settings(settings) for run in plan(settings)}
    assert (by["moco-v2"].optimizer, by["moco-v2"].schedule) == ("sgd", "cosine")
    assert by["moco-v2"].learning_rate == pytest.approx(0.03 / 4)
    assert (by["byol"].optimizer, by["byol"].learning_rate) == ("lars", pytest.approx(0.05))
    assert settings.views == "own"
    given = _completed(small, methods=("byol",), recipe="own", learning_rate=0.1, views="affine")
    assert plan(given)[0].settings(given).learning_rate == 0.1  # what is given goes first
    assert given.views == "affine"


def test_the_rate_follows_the_batch(small: Make) -> None:
    adamw = small(batch_size=64, learning_rate=0.002, optimizer="adamw")
    assert recipe_of("moco-v2", {"batch_size": 16}, adamw) == {"batch_size": 16, "learning_rate": 0.001}
    sgd = small(batch_size=64, learning_rate=0.02, optimizer="sgd")
    assert recipe_of("moco-v2", {"batch_size": 16}, sgd)["learning_rate"] == 0.005
    assert recipe_of("moco-v2", {"batch_size": 16, "learning_rate": 1.0}, sgd)["learning_rate"] == 1.0


def test_batch_ablation_shows_the_same_number_of_images(
    tmp_path: Path, small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ABLATIONS["batch"]
    assert {(line.method, line.recipe["batch_size"]) for line in whole.variations} == {
        (method, size) for method in ("moco-v2", "simclr", "end-to-end") for size in (16, 32, 64, 256)
    }
    few = [line for line in whole.variations if line.recipe["batch_size"] in (16, 32)]
    monkeypatch.setitem(ABLATIONS, "batch", type(whole)(whole.question, few, whole.option))
    settings = Settings(data="small", epochs=1, ablation="batch")
    results = bench(settings, tmp_path, Quiet())
    assert [record["status"] for record in results.runs] == ["finished"] * 6
    assert {record["images_seen"] for record in results.runs} == {96}
    assert {(r["recipe"]["batch_size"], r["steps"]) for r in results.runs} == {(16, 6), (32, 3)}
    page = write_report([tmp_path], tmp_path).read_text()
    assert "Memory against batch size" in page
    assert (tmp_path / "figures" / "sweep-batch_size.svg").exists()


def test_every_method_has_the_same_number_of_trials(small: Make) -> None:
    tune = {"learning_rate": [1e-3, 2e-3], "temperature": [0.1, 0.2, 0.5]}
    trials = plan_trials(_completed(small, methods=("moco-v2", "byol"), tune=tune))
    assert {method: len(runs) for method, runs in trials.items()} == {"moco-v2": 6, "byol": 6}
    assert len({(run.label, run.seed) for run, _ in trials["byol"]}) == 6  # its two points, with three seeds
    assert {run.options["temperature"] for run, _ in trials["moco-v2"]} == {0.1, 0.2, 0.5}
    with pytest.raises(SettingsError, match="--tune nonsense: none of moco-v2 has such an option"):
        plan_trials(_completed(small, tune={"nonsense": [1]}))


def test_trials_do_not_see_test_images() -> None:
    data = load_data("small", None, None, 20)
    part = held_out(data)
    assert len(part.train) + len(part.test) == len(data.train)
    seen = {tuple(image.flatten().tolist()) for image in data.test.images}
    assert not seen & {tuple(image.flatten().tolist()) for image in part.test.images}
    assert part.pretrain is part.train  # nor does a trial learn from what it is judged on


def test_the_pick_is_the_best_mean() -> None:
    records = [{"values": {"a": a}, "knn_top1": score} for a, score in ((1, 0.9), (1, None), (2, 0.5), (2, 0.6))]
    assert pick(records) == {"a": 2}


def test_tuned_values_are_used_and_said(tmp_path: Path, small: Make) -> None:
    settings = small(epochs=3, tune={"learning_rate": [1e-3, 2e-3]})
    results = bench(settings, tmp_path, Quiet())
    picked = results.content["tuning"]["picks"]["moco-v2"]["learning_rate"]
    trials = results.content["tuning"]["trials"]
    assert picked == max(trials, key=lambda trial: trial["knn_top1"])["values"]["learning_rate"]
    assert results.runs[0]["recipe"]["learning_rate"] == picked
    assert "What each method has picked" in write_report([tmp_path], tmp_path).read_text()
    before = (tmp_path / "tune" / "results.json").stat().st_mtime_ns
    bench(settings, tmp_path, Quiet())  # continues: nothing is tried again
    assert (tmp_path / "tune" / "results.json").stat().st_mtime_ns == before


def test_an_engine_that_is_not_installed_is_said_with_the_pip_command_and_one_that_is(
    small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moco_plugins.bench.plan.complete._installed", lambda framework: framework == "transformers")
    with pytest.raises(
        MissingExtraError, match=r"needs lightly.*\[lightly\]\"; or --engine accelerate, which is there"
    ):
        _completed(small)
    assert _completed(small, engine="accelerate").engine == "accelerate"
    monkeypatch.setattr("moco_plugins.bench.plan.complete._installed", lambda framework: False)
    with pytest.raises(MissingExtraError, match=r"\[lightly\]\"$"):
        _completed(small)
