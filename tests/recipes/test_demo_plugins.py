"""The demo plugins, installed by pip with their entry points, in the hands of the core."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "recipes" / "plugins"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    folders = [str(PLUGINS / name) for name in ("hard_negatives", "random_queue", "demo")]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            str(target),
            *folders,
        ],
        check=True,
        capture_output=True,
        timeout=300,
    )
    return target


def run(installed: Path, code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(installed), **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


SETUP = """
import torch, torch.nn as nn, torch.nn.functional as F
from moco_plugins import MoCo, info_nce, plugins
torch.manual_seed(0)
torch.set_num_threads(1)
"""


def test_hard_negative_mixing_is_info_nce_with_more_negatives(installed):
    code = """
loss = plugins.build_loss("hard_negatives", dict(hardest=8, mixed=5))
q, k = (F.normalize(torch.randn(6, 4), dim=1) for _ in range(2))
n = F.normalize(torch.randn(32, 4), dim=1)
assert loss(q, k, n, 0.2) > info_nce(q, k, n, 0.2)
plain = plugins.build_loss("hard_negatives", dict(mixed=0))
for in_batch in (False, True):
    assert torch.allclose(plain(q, k, n, 0.2, in_batch), info_nce(q, k, n, 0.2, in_batch), atol=1e-6)
# one hardest negative: every mixture is that negative again
only = plugins.build_loss("hard_negatives", dict(hardest=1, mixed=3))
worst = torch.stack([n[(n @ x).argmax()] for x in q])
want = torch.stack([
    info_nce(q[i : i + 1], k[i : i + 1], torch.cat([n, worst[i].repeat(3, 1)]), 0.2) for i in range(6)
]).mean()
assert torch.allclose(only(q, k, n, 0.2), want, atol=1e-6)
print("ok")
"""
    assert run(installed, SETUP + code).strip() == "ok"


def test_both_parts_in_a_moco_that_learns(installed):
    code = """
net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32))
moco = MoCo(net, 32, queue_size=128, projection_dim=16, momentum=0.9, queue="random",
            loss="hard_negatives", loss_options=dict(hardest=16, mixed=8))
optimizer = torch.optim.Adam(moco.parameters(), 1e-2)
from sklearn.datasets import load_digits
digits = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
for step in range(150):
    images = digits[torch.randint(len(digits), (64,))]
    loss = moco([images + 0.2 * torch.randn_like(images) for _ in range(2)])
    optimizer.zero_grad(); loss.backward(); optimizer.step()
after = moco.metrics()  # by chance the positive is nearest in one of 129 cases
assert int(moco.queue.filled) == 128 and moco.steps == 150
assert after["contrastive_top1"] > 0.5 and after["positive_cosine"] > after["negative_cosine"] + 0.4, after
print(sorted(moco.metrics())[:2])
"""
    assert "contrastive_top1" in run(installed, SETUP + code)


def test_bench_runs_the_method_data_set_and_section_by_name(installed, tmp_path):
    command = [
        *(sys.executable, "-W", "ignore", "-m", "moco_plugins", "bench", "--methods", "moco-v2,spectral"),
        *("--data", "mnist-parity", "--epochs", "1", "--out", str(tmp_path / "out")),
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(installed)}
    )
    assert result.returncode == 0, result.stderr
    assert "spectral" in result.stdout
    report = (tmp_path / "out" / "report.html").read_text()
    assert "From the demo plugin" in report
    assert "moco-v2, spectral" in report


def test_plugins_are_listed_with_their_distribution(installed):
    out = run(installed, "from moco_plugins.cli import main; main(['plugins'])")
    for word in ("moco-hard-negatives", "moco-random-queue", "moco-demo", "0.1.0"):
        assert word in out
