from __future__ import annotations

import csv
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moco_plugins.backbones import build_backbone
from moco_plugins.bench import main
from moco_plugins.bench.main import bench
from moco_plugins.bench.plan.data import load_data
from moco_plugins.bench.plan.errors import SettingsError
from moco_plugins.bench.plan.settings import Settings
from moco_plugins.bench.report.comparison import engines_agree
from moco_plugins.bench.report.page import write_report
from moco_plugins.bench.report.table import text_table
from moco_plugins.bench.results import Results
from moco_plugins.bench.run import one_run as run
from moco_plugins.bench.run import watch
from moco_plugins.bench.run.progress import Quiet
from moco_plugins.bench.run.recipe import Normalise
from moco_plugins.evaluation import extract_features, knn_accuracy

Make = Callable[..., Settings]


@pytest.fixture(scope="module")
def _finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    bench(Settings(methods=("moco-v2",), data="small", epochs=2, batch_size=32), folder, Quiet())
    return folder


@pytest.fixture
def finished(_finished: Path, tmp_path: Path) -> Path:
    """A folder with one finished run."""
    return shutil.copytree(_finished, tmp_path / "finished")


def test_three_methods_from_start_to_report(tmp_path: Path, small: Make) -> None:
    results = bench(small(methods=("moco-v2", "simclr", "byol"), seeds=2), tmp_path, Quiet(), "the command")
    content = json.loads((tmp_path / "results.json").read_text())
    assert content == json.loads(json.dumps(results.content))
    assert [(b["method"], b["seed"]) for b in content["baselines"]] == [
        ("raw-pixels", 0),
        ("untrained", 0),
        ("untrained", 1),
    ]
    runs = content["runs"]
    assert {(r["method"], r["seed"]) for r in runs} == {(m, s) for m in ("moco-v2", "simclr", "byol") for s in (0, 1)}
    for record in runs:
        assert (record["engine"], record["epochs"], record["status"], record["images_seen"]) == (
            "lightning",
            2,
            "finished",
            192,
        )
        assert 0 < record["knn_top1"] <= 1
        assert 0 < record["linear_top1"] <= 1
        assert record["seconds"] > 0
        assert record["images_per_second"] == pytest.approx(192 / record["seconds"])
        assert record["peak_memory_mib"] > 50
        assert [point["epoch"] for point in record["curve"]] == [1, 2]
        assert len(record["losses"]) == 6
    by = {r["method"]: r for r in runs}
    # per image: MoCo encodes query and key, and goes back through the query; SimCLR both views; BYOL is symmetric
    assert by["moco-v2"]["forward_images"] == 2 * 192
    assert by["moco-v2"]["backward_images"] == 192
    assert (by["simclr"]["forward_images"], by["simclr"]["backward_images"]) == (2 * 192, 2 * 192)
    assert (by["byol"]["forward_images"], by["byol"]["backward_images"]) == (4 * 192, 2 * 192)
    assert by["moco-v2"]["options"]["momentum"] == 0.99
    assert by["moco-v2"]["metrics"]["key_drift"] > 0
    with (tmp_path / "results.csv").open() as file:
        assert [row["method"] for row in csv.DictReader(file)][:1] == ["raw-pixels"]
    page = write_report([tmp_path], tmp_path).read_text()
    assert page.count("data:image/png;base64,") >= 6
    assert not re.search(r'(src|href)="(?!data:)', page)  # self-contained
    for text in ("moco-v2", "raw-pixels", "the command", "From a plugin", "6 runs seen", "View pairs"):
        assert text in page
    assert (tmp_path / "figures" / "views.png").stat().st_size > 1000
    assert text_table(content).count("\n") == 6


def test_a_seed_fixes_everything(finished: Path, tmp_path: Path, small: Make) -> None:
    reference = Results(finished).runs[0]
    runs = bench(small(methods=("simclr", "moco-v2"), seeds=2), tmp_path / "more", Quiet()).runs
    again, other = (next(r for r in runs if (r["method"], r["seed"]) == ("moco-v2", seed)) for seed in (0, 1))
    assert again["losses"] == reference["losses"]  # whatever else is compared
    assert again["knn_top1"] == reference["knn_top1"]
    assert other["losses"] != reference["losses"]


def test_engines_agree_step_by_step(tmp_path: Path, small: Make) -> None:
    engines = ("lightning", "mmengine", "accelerate")
    for framework in ("mmengine", "accelerate"):
        pytest.importorskip(framework)
    runs = [bench(small(engine=engine, tensorboard=True), tmp_path / engine, Quiet()).runs[0] for engine in engines]
    for engine in engines:
        logs = EventAccumulator(str(next((tmp_path / engine).glob("runs/*/tensorboard")))).Reload()
        assert [event.step for event in logs.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
        assert logs.Scalars("val_knn_top1")[-1].step == 6
    for steps in zip(*(record["losses"] for record in runs), strict=True):
        assert len({step[0] for step in steps}) == 1
        assert max(step[1] for step in steps) - min(step[1] for step in steps) < 1e-5
    (sentence,) = engines_agree({"runs": runs})
    assert sentence.startswith("moco-v2, seed 0: lightning, mmengine and accelerate give ")
    assert sentence.endswith("and the same kNN accuracy.")
    content = json.loads((tmp_path / "accelerate" / "results.json").read_text())
    assert {"accelerate", "mmengine", "pytorch-lightning"} <= content["versions"].keys()


def test_each_seed_has_its_own_split(tmp_path: Path, small: Make) -> None:
    data = load_data("digits", None, None, 20)
    parts = [data.of_seed(seed) for seed in (0, 1, 2)]
    assert parts[0] is data
    tests = [{tuple(image.flatten().tolist()) for image in part.test.images} for part in parts]
    for first, second in itertools.combinations(tests, 2):
        assert len(first & second) < 0.4 * len(first)  # one fifth by chance
    settings = small(data="digits", epochs=1, batch_size=256, seeds=2, backbone="convnet")
    content = bench(settings, tmp_path, Quiet()).content
    raw = [b["knn_top1"] for b in content["baselines"] if b["method"] == "raw-pixels"]
    assert len(set(raw)) == 2
    assert "own split" in write_report([tmp_path], tmp_path).read_text()
    again = bench(settings, tmp_path, Quiet()).content  # nothing is done twice
    assert len(again["baselines"]) == 4


def test_finished_runs_are_kept_and_missing_ones_added(
    finished: Path, monkeypatch: pytest.MonkeyPatch, small: Make
) -> None:
    before = Results(finished).runs[0]
    trained = []
    carry_out = main.carry_out
    monkeypatch.setattr(main, "carry_out", lambda plan, *rest: trained.append(plan.label) or carry_out(plan, *rest))
    after = bench(small(methods=("moco-v2", "simclr")), finished, Quiet()).runs
    assert trained == ["simclr"]
    assert after[0] == before


@pytest.mark.parametrize(
    "change", [{"epochs": 3}, {"batch_size": 16}, {"data": "digits"}, {"options": {"momentum": 0.9}}]
)
def test_other_settings_are_never_mixed_in(finished: Path, change: dict[str, Any], small: Make) -> None:
    before = (finished / "results.json").read_text()
    with pytest.raises(SettingsError, match="another --out"):
        bench(small(**change), finished, Quiet())
    assert (finished / "results.json").read_text() == before


def test_a_method_that_cannot_be_built_is_recorded_too(tmp_path: Path, small: Make) -> None:
    settings = small(methods=("fails", "moco-v2"), method_options={"fails": {"how": "build"}}, epochs=1)
    failed, good = bench(settings, tmp_path, Quiet()).runs
    assert failed["error"] == "RuntimeError: no room for it"
    assert good["status"] == "finished"


def test_a_failing_run_is_recorded_and_the_others_go_on(tmp_path: Path, small: Make) -> None:
    results = bench(small(methods=("fails", "moco-v2")), tmp_path, Quiet())
    failed, good = results.runs
    assert (failed["status"], good["status"]) == ("failed", "finished")
    assert failed["error"] == "RuntimeError: the disk is full"
    page = write_report([tmp_path], tmp_path).read_text()
    assert "the disk is full" in page
    again = bench(small(methods=("fails", "moco-v2"), method_options={"fails": {"at": 1000}}), tmp_path, Quiet())
    assert {r["status"] for r in again.runs} == {"finished"}  # a failed run is tried again


def test_a_picture_that_cannot_be_drawn_fails_no_run(
    tmp_path: Path, small: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("no canvas")

    monkeypatch.setattr(run, "draw_features", broken)
    said: list[str] = []
    quiet = Quiet()
    monkeypatch.setattr(quiet, "say", said.append)
    (record,) = bench(small(epochs=1), tmp_path, quiet).runs
    assert record["status"] == "finished"
    assert said == ["moco-v2: its pictures could not be drawn: RuntimeError: no canvas"]


@pytest.mark.parametrize("engine", ["lightning", "mmengine"])
def test_the_trained_backbone_is_kept_and_nothing_else_that_is_large(tmp_path: Path, small: Make, engine: str) -> None:
    methods = ("moco-v2", "dino") if engine == "lightning" else ("moco-v2",)
    records = bench(small(methods=methods, engine=engine, seeds=2), tmp_path, Quiet()).runs
    data = load_data("small", None, None, 20)
    for record in records:
        folder = tmp_path / "runs" / f"{record['method']}-seed{record['seed']}-{engine}"
        assert [path.name for path in folder.rglob("*") if path.stat().st_size > 100_000] == ["backbone.pt"]
        kept = torch.load(folder / "backbone.pt", weights_only=True)
        backbone, _ = build_backbone(kept["backbone"], kept["channels"], kept["image_size"])
        backbone.load_state_dict(kept["state_dict"])
        finish = Normalise(kept["mean"], kept["std"])
        train, test = (extract_features(backbone, part, finish) for part in (data.train, data.test))
        assert knn_accuracy(*train, *test) == record["knn_top1"]


def test_the_kept_backbone_loads_into_the_library_it_comes_from(tmp_path: Path, small: Make) -> None:
    from torchvision.models import resnet18

    bench(small(backbone="resnet18", epochs=1), tmp_path, Quiet())
    theirs = resnet18()
    theirs.conv1 = torch.nn.Conv2d(1, 64, 7, 2, 3, bias=False)  # grey images
    theirs.fc = torch.nn.Identity()
    kept = torch.load(tmp_path / "runs" / "moco-v2-seed0-lightning" / "backbone.pt", weights_only=True)
    theirs.load_state_dict(kept["state_dict"], strict=True)


def test_nan_stops_that_run(tmp_path: Path, small: Make) -> None:
    settings = small(methods=("fails", "moco-v2"), method_options={"fails": {"how": "nan", "at": 5}})
    failed, good = bench(settings, tmp_path, Quiet()).runs
    assert failed["status"] == "failed"
    assert "NonFiniteLossError: the loss is nan at step 5" in failed["error"]
    assert [point["epoch"] for point in failed["curve"]] == [1]
    assert good["status"] == "finished"


def test_interrupt_keeps_what_is_finished_and_the_same_call_continues(tmp_path: Path, small: Make) -> None:
    settings = small(methods=("moco-v2", "fails"), method_options={"fails": {"how": "interrupt", "at": 5}})
    with pytest.raises(KeyboardInterrupt):
        bench(settings, tmp_path, Quiet())
    assert [r["method"] for r in Results(tmp_path).runs] == ["moco-v2"]
    again = bench(settings, tmp_path, Quiet()).runs  # two epochs need 6 steps: three remain after the checkpoint
    assert [r["status"] for r in again] == ["finished", "finished"]
    assert again[1]["resumed_at_step"] == 3


def test_an_interrupted_run_ends_with_the_same_numbers(tmp_path: Path, small: Make) -> None:
    whole = bench(small(epochs=3), tmp_path / "whole", Quiet()).runs[0]

    class Stops(Quiet):
        def step(self, step: int, loss: float) -> None:
            if step == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(small(epochs=3), tmp_path / "cut", Stops())
    resumed = bench(small(epochs=3), tmp_path / "cut", Quiet()).runs[0]
    assert resumed["resumed_at_step"] == 3
    for name in ("losses", "knn_top1", "linear_top1", "images_seen", "forward_images"):
        assert resumed[name] == whole[name], name
    assert [p["val_knn_top1"] for p in resumed["curve"]] == [p["val_knn_top1"] for p in whole["curve"]]


def test_without_labels_accuracy_is_left_out(tmp_path: Path, small: Make) -> None:
    results = bench(small(data="bare"), tmp_path, Quiet())
    record = results.runs[0]
    assert record["status"] == "finished"
    assert "knn_top1" not in record
    assert record["uniformity"] < 0
    assert "no labels" in write_report([tmp_path], tmp_path).read_text()


def test_looking_at_a_run_does_not_change_it(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: Make
) -> None:
    monkeypatch.setattr(watch.Watch, "look", lambda self: {"loss": torch.rand(3).sum().item()})
    assert bench(small(), tmp_path / "b", Quiet()).runs[0]["losses"] == Results(finished).runs[0]["losses"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"methods": ("nope",)}, LookupError, r"method='nope'.*byol \(lightly\).*moco-v2 \(builtin\)"),
        ({"data": "nope"}, LookupError, r"data='nope'.*mnist5k \(builtin\)"),
        ({"engine": "nope"}, LookupError, r"engine='nope'.*lightning \(lightly\)"),
        ({"backbone": "resnet81"}, LookupError, "resnet18"),
        ({"epochs": 0}, SettingsError, "--epochs 0"),
        ({"batch_size": 97}, SettingsError, "only 96 images"),
        ({"methods": ("simclr", "simclr")}, SettingsError, "named twice"),
        ({"options": {"momentun": 0.9}}, SettingsError, r"'momentun'.*moco-v2 has not got it, it has .*momentum"),
        ({"sweep": {"queue_size": (1, 2)}, "methods": ("moco-v2", "simclr")}, SettingsError, "simclr has not got it"),
        ({"views": "nope"}, LookupError, "views='nope'"),
        ({"view_options": {"foo": 1}}, SettingsError, "^moco-v2: .*foo"),
        ({"learning_rate": -1.0}, SettingsError, "--learning-rate -1.0"),
        ({"weight_decay": -3.0}, SettingsError, "--weight-decay -3.0"),
        ({"image_size": 1}, SettingsError, "--image-size 1"),
        ({"workers": -1}, SettingsError, "--workers -1"),
        ({"precision": "8"}, SettingsError, "--precision 8: there are 32, bf16-mixed"),
        ({"device": "gpu"}, SettingsError, "--device gpu: there are auto, cpu"),
        ({"device": "cuda:99"}, SettingsError, "--device cuda:99: torch finds"),
        ({"num_nodes": 2}, SettingsError, "--nodes 2: nobody would start the other nodes.*torchrun --nnodes 2"),
        ({"options": {"momentum": 1.5}}, SettingsError, "^moco-v2: momentum=1.5"),
        ({"sweep": {"temperature": (0.1, -1)}}, SettingsError, "^moco-v2 temperature=-1: temperature=-1"),
    ],
)
def test_bad_input(tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str, small: Make) -> None:
    with pytest.raises(error, match=message):
        bench(small(**change), tmp_path / "out", Quiet())
    assert not (tmp_path / "out").exists()


def test_a_reference_that_will_not_be_there(tmp_path: Path, small: Make) -> None:
    with pytest.raises(SettingsError, match="--reference 'nobody': there will be moco-v2"):
        bench(small(), tmp_path / "out", Quiet(), reference="nobody")
    assert not (tmp_path / "out" / "runs").exists()


def test_out_is_a_file(tmp_path: Path, small: Make) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(SettingsError, match="out is a file; give a folder"):
        bench(small(), tmp_path / "out", Quiet())
    assert (tmp_path / "out").read_text() == "mine"


def test_a_sweep_runs_every_value(tmp_path: Path, small: Make) -> None:
    runs = bench(small(epochs=1, sweep={"momentum": (0.0, 0.9)}), tmp_path, Quiet()).runs
    assert [(r["label"], r["options"]["momentum"]) for r in runs] == [
        ("moco-v2 momentum=0.0", 0.0),
        ("moco-v2 momentum=0.9", 0.9),
    ]
