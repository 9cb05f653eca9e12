"""The speed table: it measures what it says. How fast is not judged here; see tests/benchmarks."""

import time

import torch
from torch import nn

from moco_plugins.bench import speed
from moco_plugins.bench.speed_views import view_contenders


def test_paired_times_in_turn_and_takes_the_ratio_within_a_turn():
    order = []
    contenders = {
        "short": lambda: (order.append("short"), time.sleep(0.002)),
        "long": lambda: (order.append("long"), time.sleep(0.02)),
    }
    seconds = speed.paired(contenders, turns=3)
    assert order == ["short", "long"] * 4
    assert len(seconds["short"]) == 3
    assert 3 < speed.ratio(seconds, "long", "short") < 30


def test_extra_memory_sees_a_temporary_tensor_and_not_a_view():
    kept = torch.zeros(1000, 1000)
    assert 4e6 <= speed.extra_peak_bytes(lambda: kept.clone().sum()) < 4.2e6
    assert speed.extra_peak_bytes(lambda: kept[10:].T) < 1e4


def test_contenders_do_the_same_work():
    n, size, dim = 8, 64, 16
    contenders = speed.loss_contenders(n, size, dim)
    assert {"moco-plugins", "plain formula", "two products", "lightly"} <= set(contenders)
    for contender in contenders.values():
        contender()
    net = nn.Linear(4, 3)
    for name, contender in speed.ema_contenders(net).items():
        contender()
        assert name


def test_our_part_takes_under_a_tenth_of_the_queue_in_memory():
    n, size, dim = 64, 16384, 64
    contenders = speed.loss_contenders(n, size, dim)
    queue_bytes = size * dim * 4
    assert speed.extra_peak_bytes(contenders["moco-plugins"]) < 0.1 * queue_bytes
    assert speed.extra_peak_bytes(contenders["plain formula"]) > queue_bytes


def test_the_command_prints_its_table(monkeypatch, capsys):
    monkeypatch.setattr(speed, "SHAPES", [(8, 256, 16, torch.float32)])
    monkeypatch.setattr(speed, "step_overhead", lambda **_: 0.01)
    assert speed.main(["--turns", "1", "--quick", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    for word in ("plain formula", "two products", "lightly", "one flat lerp", "mmengine", "swa_utils", "+1.0 %"):
        assert word in out


def test_step_overhead_is_a_fraction_of_the_bare_step():
    added = speed.step_overhead(n=2, size=256, image_size=32, turns=1)
    assert -0.9 < added < 20


def test_views_are_timed_beside_those_of_others_by_their_names(monkeypatch):
    for size, source in ((16, (16, 16)), (80, (90, 100))):
        contenders = view_contenders(size, source, 2, "cpu")
        first = "batched" if size == 16 else "crop, finish"
        assert list(contenders) == [first, "one by one", "torchvision.transforms.v2", "lightly"]
        for contender in contenders.values():
            contender()
    monkeypatch.setattr(
        speed, "view_contenders", lambda *_: {"batched": lambda: None, "lightly": lambda: time.sleep(1e-3)}
    )
    before = torch.get_num_threads()
    rows = speed.view_rows(1, True, "cpu")
    assert [(what, name) for what, name, _ in rows] == [
        ("two views, 32 px from 32 x 32, one core", "lightly / batched"),
        ("two views, 224 px from 500 x 400, one core", "lightly / batched"),
    ]
    assert torch.get_num_threads() == before


def test_the_profiler_says_nothing_on_the_terminal(capfd):
    speed.extra_peak_bytes(lambda: torch.rand(10).sum())
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
