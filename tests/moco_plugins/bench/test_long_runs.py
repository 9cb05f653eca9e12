from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from torchvision.transforms.functional import to_pil_image

from moco_plugins import cli
from moco_plugins.bench.main import bench
from moco_plugins.bench.plan.budget import Budget
from moco_plugins.bench.plan.complete import complete
from moco_plugins.bench.plan.data import load_data
from moco_plugins.bench.plan.errors import SettingsError
from moco_plugins.bench.plan.runs import plan
from moco_plugins.bench.plan.settings import Settings
from moco_plugins.bench.report.findings import warnings
from moco_plugins.bench.report.merge import merged
from moco_plugins.bench.report.page import gather, write_report
from moco_plugins.bench.results import Results
from moco_plugins.bench.run.lengths import Length, length_for
from moco_plugins.bench.run.one_run import thinned
from moco_plugins.bench.run.progress import Quiet
from moco_plugins.bench.run.recipe import build_loader, views_name
from moco_plugins.bench.run.set_up import build_method, set_up
from moco_plugins.data.arrays import ImageArray
from moco_plugins.data.loader import make_loader
from moco_plugins.hooks import manager as plugins
from moco_plugins.hooks.method import asked_of

Make = Callable[..., Settings]
COMMAND = [
    sys.executable,
    "-m",
    "moco_plugins",
    "bench",
    "--data",
    "digits",
    "--methods",
    "moco-v2",
    "--progress",
    "json",
]


#: A plugin with a method whose loss is NaN in the third step, on the first rank only.
SHORT_LIVED = """
import torch
from moco_plugins import hookimpl
from moco_plugins.core.moco import MoCo
from moco_plugins.steps import distributed

class ShortLived(MoCo):
    def forward(self, views):
        loss = super().forward(views)
        return loss * float("nan") if self.steps == 2 and distributed.rank() == 0 else loss

@hookimpl
def moco_methods():
    return {"short-lived": ShortLived}
"""


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_continues_after_kill_9_to_the_same_numbers(tmp_path: Path) -> None:
    command = [*COMMAND, "--epochs", "6", "--batch-size", "256", "--out"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert cli.main([*command[3:], str(whole)]) == 0
    process = subprocess.Popen([*command, str(cut)], stderr=subprocess.PIPE, text=True, env=_environment())
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("{") and json.loads(line).get("epoch") == 3:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert Results(cut).runs == []
    assert cli.main([*command[3:], str(cut)]) == 0
    first, second = Results(whole).runs[0], Results(cut).runs[0]
    assert second["resumed_at_step"] >= 10
    for name in ("losses", "knn_top1", "linear_top1", "uniformity", "images_seen"):
        assert first[name] == second[name], name


def test_killed_within_an_epoch_continues_to_the_same_numbers(tmp_path: Path) -> None:
    command = [*COMMAND, "--epochs", "2", "--batch-size", "32", "--checkpoint-minutes", "0", "--out"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert cli.main([*command[3:], str(whole)]) == 0
    process = subprocess.Popen([*command, str(cut)], stderr=subprocess.DEVNULL, env=_environment())
    curve = cut / "runs" / "moco-v2-seed0-lightning" / "curve.json"
    until = time.monotonic() + 300  # starting takes a while on a busy machine
    while time.monotonic() < until and not (curve.exists() and len(json.loads(curve.read_text())["losses"]) > 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert Results(cut).runs == []
    assert cli.main([*command[3:], str(cut)]) == 0
    first, second = Results(whole).runs[0], Results(cut).runs[0]
    assert 0 < second["resumed_at_step"] < 44  # before the end of the first epoch
    for name in ("losses", "knn_top1", "linear_top1", "uniformity", "images_seen"):
        assert first[name] == second[name], name


def test_two_processes(tmp_path: Path) -> None:
    command = [
        *COMMAND,
        "--epochs",
        "1",
        "--batch-size",
        "512",
        "--devices",
        "2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path),
    ]
    shown = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    (run,) = Results(tmp_path).runs
    assert (run["status"], run["images_seen"], run["forward_images"]) == ("finished", 1024, 2048)
    events = [json.loads(line)["event"] for line in shown.stderr.splitlines() if line.startswith("{")]
    assert events == ["start", "epoch", "end"]  # the second process is silent


def _settings(small: Make, **changes: Any) -> Any:
    settings = small(**changes)
    data = load_data(settings.data, None, None, settings.knn_k)
    return complete(settings, data), data


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        # 96 images, batches of 32: 3 steps an epoch. MoCo makes 3 passes an image, BYOL 6.
        ("images=960", {"moco-v2": Length(10, 3), "byol": Length(10, 3)}),
        ("passes=2880", {"moco-v2": Length(10, 3), "byol": Length(5, 3)}),
        ("images=320", {"moco-v2": Length(5, 2)}),  # 10 steps are no whole number of epochs
        ("passes=192", {"moco-v2": Length(1, 2), "byol": Length(1, 1)}),  # less than an epoch
    ],
)
@pytest.mark.parametrize("name", ["lightning", "mmengine"])
def test_budgets_become_a_length(
    small: Make, tmp_path: Path, budget: str, expected: dict[str, Length], name: str
) -> None:
    settings, data = _settings(small, methods=tuple(expected), epochs=None, budget=budget, engine=name)
    engine = plugins.adapter(name).engine
    assert engine is not None
    for run in plan(settings):
        folder = tmp_path / run.method
        built = set_up(run, settings, data, folder)
        loader, method = built.loader, built.method
        before = {name: value.clone() for name, value in method.state_dict().items()}
        random_before = torch.get_rng_state()
        length = length_for(Budget.parse(budget), built.job, engine, built.backbone)
        assert length == expected[run.method]
        assert all(torch.equal(value, method.state_dict()[name]) for name, value in before.items())
        assert torch.equal(random_before, torch.get_rng_state())
        assert not folder.exists()
        assert len(loader) == 3


@settings_of_hypothesis(max_examples=200, deadline=None)
@given(images=st.integers(1, 10**6), size=st.integers(2, 5000), batch=st.integers(2, 64))
def test_a_budget_is_met_to_half_a_step_an_epoch(images: int, size: int, batch: int) -> None:
    batch = min(batch, size)
    pixels = torch.zeros(size, 1, 1, 1, dtype=torch.uint8)
    loader = make_loader(ImageArray(pixels, None), lambda image: (image, image), lambda views: views, batch, 0)
    nothing: Any = None
    length = length_for(Budget("images", images), SimpleNamespace(loader=loader), nothing, nothing)  # type: ignore[arg-type]
    assert 1 <= length.steps <= len(loader)
    wanted = max(1.0, images / batch)
    assert abs(length.epochs * length.steps - wanted) <= length.epochs / 2 + 0.5


@pytest.mark.parametrize("engine", ["lightning", "mmengine"])
def test_a_budget_ends_epochs_early_in_every_engine(small: Make, tmp_path: Path, engine: str) -> None:
    (run,) = bench(small(epochs=None, budget="images=256", engine=engine), tmp_path, Quiet()).runs
    assert (run["status"], run["steps"], run["images_seen"], run["epochs"]) == ("finished", 8, 256, 2.67)
    assert [point["epoch"] for point in run["curve"]] == [0.667, 1.333, 2.0, 2.667]  # two steps of three each


def test_a_budget_of_seconds_is_kept_for_the_resume(small: Make, tmp_path: Path) -> None:
    settings = small(epochs=None, budget="seconds=0.5")
    begin = time.perf_counter()
    (run,) = bench(settings, tmp_path, Quiet()).runs
    assert run["status"] == "finished", run.get("error")
    assert run["seconds"] < max(5.0, time.perf_counter() - begin)
    kept = json.loads((tmp_path / "runs" / "moco-v2-seed0-lightning" / "length.json").read_text())
    assert kept["epochs"] * kept["steps"] == run["steps"]
    assert run["images_seen"] == 32 * run["steps"]


@pytest.mark.parametrize("text", ["seconds", "minutes=3", "epochs=0", "passes=many"])
def test_budgets_that_mean_nothing(text: str) -> None:
    with pytest.raises(SettingsError, match=f"--budget '{text}'"):
        Budget.parse(text)


def test_each_method_in_its_own_views(small: Make) -> None:
    settings, _ = _settings(small, views="own", methods=("moco-v1", "byol", "simclr"))
    assert [views_name(settings, method) for method in settings.methods] == ["v1", "v3", "v2"]


def test_all_views_are_shown(small: Make, tmp_path: Path) -> None:
    bench(small(views="own", methods=("moco-v1", "moco-v2", "simclr"), epochs=1), tmp_path, Quiet())
    page = write_report([tmp_path], tmp_path).read_text()
    for kind in ("v1", "v2"):
        assert page.count(f"<h3>View pairs: {kind}</h3>") == 1


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("momentum", ["moco-v2 momentum=0.0", "moco-v2 momentum=0.999"]),
        ("queue", ["moco-v2 queue_size=64", "moco-v2 queue_size=4096"]),
        ("mechanisms", ["end-to-end", "memory-bank", "moco-v2"]),
        ("negatives", ["queue only", "batch only", "queue and batch"]),
    ],
)
def test_ablations_can_be_built_and_give_a_loss(small: Make, name: str, labels: list[str]) -> None:
    from moco_plugins.bench.run.dictionaries import register_dictionaries

    register_dictionaries()
    settings, data = _settings(small, methods=Settings().methods, ablation=name)
    runs = plan(settings)
    assert set(labels) <= {run.label for run in runs}
    for run in runs:
        loader = build_loader(settings, data, run.method, 0)
        method, _ = build_method(run, settings, data, loader)
        views, *known = next(iter(loader))
        assert torch.isfinite(method(views, **asked_of(method, *known)))


def test_mechanisms_run_and_are_reported(small: Make, tmp_path: Path) -> None:
    results = bench(
        small(methods=Settings().methods, ablation="mechanisms", epochs=1, tensorboard=True), tmp_path, Quiet()
    )
    runs = {run["label"]: run for run in results.runs}
    assert {run["status"] for run in runs.values()} == {"finished"}
    passes = {label: (r["forward_images"] / 96, r["backward_images"] / 96) for label, r in runs.items()}
    assert passes == {"end-to-end": (2, 2), "memory-bank": (1, 1), "moco-v2": (2, 1)}
    assert "Which dictionary?" in write_report([tmp_path], tmp_path).read_text()
    logs = list(tmp_path.glob("runs/*/tensorboard/events.*"))
    assert len(logs) == 3
    assert all(log.stat().st_size > 100 for log in logs)


def test_reports_are_merged(small: Make, tmp_path: Path) -> None:
    bench(small(), tmp_path / "a", Quiet(), "first command")
    bench(small(methods=("simclr",), epochs=1), tmp_path / "b", Quiet(), "second command")
    page = write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "both").read_text()
    for text in ("moco-v2", "simclr", "first command", "second command", "The merged results differ in epochs"):
        assert text in page
    assert page.count("<th scope=row>untrained") == 1


def test_seeds_of_several_machines_are_merged(small: Make, tmp_path: Path) -> None:
    whole = bench(small(epochs=1, seeds=2), tmp_path / "whole", Quiet())
    parts = [tmp_path / "first", tmp_path / "second"]
    for seed, folder in enumerate(parts):
        bench(small(epochs=1, first_seed=seed), folder, Quiet())
    content = merged([Results(folder).content for folder in parts], ["first", "second"])
    assert [(run["label"], run["seed"]) for run in content["runs"]] == [("moco-v2", 0), ("moco-v2", 1)]
    assert [run["losses"] for run in content["runs"]] == [run["losses"] for run in whole.runs]
    assert not content["differences"]


def test_runs_of_other_settings_are_never_averaged(small: Make, tmp_path: Path) -> None:
    bench(small(), tmp_path / "a", Quiet())
    bench(small(epochs=1), tmp_path / "b", Quiet())
    bench(small(options={"momentum": 0.5}), tmp_path / "c", Quiet())
    bench(small(image_size=16), tmp_path / "d", Quiet())
    shutil.copytree(tmp_path / "a", tmp_path / "e")
    folders = [tmp_path / name for name in "abcde"]
    content = merged([Results(folder).content for folder in folders], list("abcde"))
    assert [run["label"] for run in content["runs"]] == ["moco-v2", "moco-v2 (b)", "moco-v2 (c)", "moco-v2 (d)"]
    untrained = [b["label"] for b in content["baselines"] if b["method"] == "untrained"]
    assert untrained == ["untrained", "untrained (d)"]
    page = write_report(folders, tmp_path / "all").read_text()
    for text in ("moco-v2 (c)", "untrained (d)", "View pairs (d)", "they differ in epochs and image_size", "8 and 16"):
        assert text in page


def test_merged_results_are_results(small: Make, tmp_path: Path) -> None:
    for name, changes in {"a": {}, "b": {"epochs": 1}, "c": {"methods": ("simclr",)}}.items():
        bench(small(**changes), tmp_path / name, Quiet())
    write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    write_report([tmp_path / "ab", tmp_path / "c"], tmp_path / "abc")
    content = Results(tmp_path / "abc").content
    assert [run["label"] for run in content["runs"]] == ["moco-v2", "moco-v2 (b)", "simclr"]
    assert content["differences"] == {"epochs": [2, 1]}
    before = (tmp_path / "a" / "results.json").read_text()
    write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "a")  # never over somebody's own results
    assert (tmp_path / "a" / "results.json").read_text() == before


def test_folders_of_one_name_stay_apart(small: Make, tmp_path: Path) -> None:
    folders = [tmp_path / name / "bench" for name in "abc"]
    for folder, epochs in zip(folders, (1, 2, 3), strict=True):
        bench(small(epochs=epochs), folder, Quiet())
    labels = [run["label"] for run in gather(folders)["runs"]]
    assert labels == ["moco-v2", *(f"moco-v2 ({folder})" for folder in folders[1:])]


def test_a_measured_budget_needs_one_process_to_measure(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingsError, match="--budget seconds=1: processes that a launcher has started"):
        bench(small(epochs=None, budget="seconds=1"), tmp_path, Quiet())


@pytest.mark.parametrize("engine", ["lightning", "mmengine"])
def test_measured_budgets_of_two_processes(tmp_path: Path, engine: str) -> None:
    given = [
        "--methods",
        "moco-v2",
        "memory-bank",
        "--budget",
        "passes=9000",
        "--batch-size",
        "256",
        "--engine",
        engine,
    ]
    command = [*COMMAND[:6], *given, "--devices", "2", "--device", "cpu", "--progress", "quiet", "--out", str(tmp_path)]
    shown = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    runs = {run["method"]: run for run in Results(tmp_path).runs}
    # 256 images a step: 3 and 2 passes each; five steps are an epoch
    assert {name: run["steps"] for name, run in runs.items()} == {"moco-v2": 12, "memory-bank": 18}
    assert {name: run["forward_images"] + run["backward_images"] for name, run in runs.items()} == {
        "moco-v2": 9216,
        "memory-bank": 9216,
    }


@pytest.mark.parametrize("engine", ["lightning", "mmengine"])
def test_a_run_that_fails_in_two_processes_is_recorded_and_the_next_goes_on(tmp_path: Path, engine: str) -> None:
    (tmp_path / "fails").mkdir()
    (tmp_path / "fails" / "short_lived.py").write_text(SHORT_LIVED)
    info = tmp_path / "fails" / "short_lived-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: short-lived\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[moco_plugins]\nshort-lived = short_lived\n")
    given = ["--methods", "short-lived", "moco-v2", "--epochs", "2", "--batch-size", "256", "--engine", engine]
    command = [*COMMAND[:6], *given, "--devices", "2", "--device", "cpu", "--progress", "quiet", "--out", str(tmp_path)]
    environment = {**_environment(), "PYTHONPATH": str(tmp_path / "fails")}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert shown.returncode == 1, shown.stderr
    runs = {run["method"]: run for run in Results(tmp_path).runs}
    assert runs["short-lived"]["error"].startswith("NonFiniteLossError: the loss is nan at step 3")
    assert runs["moco-v2"]["status"] == "finished"


def test_results_of_different_data_are_not_compared(small: Make, tmp_path: Path) -> None:
    bench(small(epochs=1), tmp_path / "a", Quiet())
    bench(small(epochs=1, data="bare"), tmp_path / "b", Quiet())
    with pytest.raises(SettingsError, match=r"different data cannot be compared \(a of small, b of bare\)"):
        write_report([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_what_the_reader_must_know_is_said(small: Make, tmp_path: Path) -> None:
    results = bench(small(knn_k=200, epochs=1), tmp_path, Quiet())
    said = " ".join(warnings(results.content))
    assert "k = 200 neighbours and there are 96 training images" in said
    assert "only 40 test images" in said
    assert "Only 1 seed" in said


def test_images_that_cannot_be_read_are_named_in_the_report(tmp_path: Path, small: Make) -> None:
    folder = tmp_path / "pictures"
    train, _ = plugins.dataset_factory("digits")(None)
    for i in range(60):
        image, label = train[i]
        (folder / f"digit{label}").mkdir(parents=True, exist_ok=True)
        to_pil_image(image).save(folder / f"digit{label}" / f"{i}.png")
    (folder / "digit0" / "broken.png").write_bytes(b"not an image")
    bench(small(data=str(folder), epochs=1, batch_size=16, backbone="convnet"), tmp_path / "out", Quiet())
    assert (
        "1 of 61 images cannot be read and are left out: digit0/broken.png"
        in write_report([tmp_path / "out"], tmp_path / "out").read_text()
    )


def test_one_class_and_no_labels(small: Make, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--metric knn_top1: The images have no labels"):
        bench(small(data="bare"), tmp_path, Quiet(), metric="knn_top1")
    train, test = plugins.dataset_factory("small")(None)
    train.labels, test.labels = torch.zeros(len(train)), torch.zeros(len(test))

    class OneClass:
        @staticmethod
        def moco_datasets() -> dict[str, Any]:
            return {"one": lambda root: (train, test)}

    from moco_plugins import hookimpl

    OneClass.moco_datasets = staticmethod(hookimpl(OneClass.moco_datasets))  # type: ignore[method-assign]
    plugins.register(OneClass, "one")
    try:
        assert load_data("one", None, None, 20).notes == (
            "All training images are of one class: accuracy is left out.",
        )
    finally:
        plugins.unregister("one")


def test_thinned_losses_are_means() -> None:
    assert thinned([1.0, 3.0, 5.0], most=2) == [[2, 2.0], [3, 5.0]]
    assert thinned([1.0, 3.0]) == [[1, 1.0], [2, 3.0]]
