"""The five tests that the adapter of every framework must pass: door, numbers, steps, resume, processes.

A new adapter is found by its entry point and tested without being named here, but for its word for accumulation (jobs.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from jobs import ACCUMULATE, Steps, build, differing, loader_of, plain_loader, plain_loop, train
from ranks import Ranks
from torch import nn

from moco_plugins import MoCo
from moco_plugins.steps import distributed

ADAPTERS = jobs.adapters()
ENGINES = [
    pytest.param(name, marks=pytest.mark.skipif(not importlib.util.find_spec(a.framework), reason=f"no {a.framework}"))
    for name, a in ADAPTERS.items()
]
every_engine = pytest.mark.parametrize("engine", ENGINES)


class Stop(Exception):
    pass


# 1. The door: found by entry point, nothing imported before it is used, and what is missing is said with its cure.

DOOR = """
import json, sys
from moco_plugins import plugins
adapters = {name: adapter for name, (_, adapter) in plugins.adapters().items() if adapter.engine}
said = {"loaded": [adapter.framework for adapter in adapters.values() if adapter.framework in sys.modules]}
for adapter in adapters.values():
    for name in (adapter.framework, *adapter.distributions):
        sys.modules[name.replace("-", "_")] = None  # as if it were not installed
for name, adapter in adapters.items():
    try:
        adapter.engine(None)  # it does not get to look at a job
    except ImportError as error:
        said[name] = str(error)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", DOOR], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@every_engine
def test_door_a_missing_framework_is_said_with_the_pip_command(engine: str, said: dict[str, Any]) -> None:
    assert said["loaded"] == []
    assert ADAPTERS[engine].install in said[engine]


@every_engine
def test_door_it_may_be_activated_any_number_of_times(engine: str) -> None:
    for _ in range(2):
        ADAPTERS[engine].activate()


# 2. The numbers: those of a plain loop, bit for bit, with all that a method asks for.


@pytest.mark.parametrize("name", ["moco-v2", "moco-v3", "byol", "simclr"])
@every_engine
def test_numbers_are_those_of_a_plain_loop(engine: str, name: str, tmp_path: Path) -> None:
    trained, plain, epochs = build(name), build(name), []
    steps, outcome = train(engine, tmp_path, trained, on_epoch=epochs.append)
    assert steps == plain_loop(plain)
    assert differing(trained, plain) == []
    assert (outcome.steps, outcome.steps_now, epochs) == (8, 8, [1, 2])
    assert trained.total_steps == 8


@every_engine
def test_numbers_labels_and_image_numbers_are_handed_on(engine: str, tmp_path: Path) -> None:
    moco, loader = build(loss="supcon", queue_size=160, queue_options={"columns": {"id": "long"}}), loader_of()
    assert isinstance(moco, MoCo)
    loader.with_ids = True
    train(engine, tmp_path, moco, loader=loader, epochs=1)
    columns: Any = moco.queue.columns  # type: ignore[union-attr]
    assert sorted(columns["id"].tolist()) == list(range(160))
    assert torch.equal(columns["label"], loader.dataset.images.labels[columns["id"]])  # type: ignore[attr-defined]
    assert loader.device == torch.device("cpu")  # where the views are to be made


@every_engine
def test_numbers_bfloat16_is_for_the_encoder_and_not_for_what_is_kept(engine: str, tmp_path: Path) -> None:
    seen = []
    method = build()
    linear = method.query_encoder.backbone[-1]  # type: ignore[union-attr,index,operator]
    linear.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    forward = method.forward
    steps, _ = train(engine, tmp_path, method, precision="bf16-mixed", epochs=1)
    assert set(seen) == {torch.bfloat16}
    assert [loss for _, loss in steps] == pytest.approx([loss for _, loss in plain_loop(build())[:4]], rel=0.05)
    assert {v.dtype for v in method.state_dict().values() if v.is_floating_point()} == {torch.float32}
    assert method.forward == forward  # it is left as it was


@every_engine
def test_numbers_looking_at_the_method_does_not_change_its_training(engine: str, tmp_path: Path) -> None:
    plain, watched = build(), build()
    images = loader_of().dataset.images.images.float() / 255  # type: ignore[attr-defined]

    def look(epoch: int) -> None:
        assert watched.training
        watched.eval()
        with torch.no_grad():
            watched.embed(images)  # type: ignore[operator]
            watched([images, images.flip(0)])
        torch.rand(3)

    train(engine, tmp_path / "a", plain)
    train(engine, tmp_path / "b", watched, on_epoch=look)
    assert differing(plain, watched) == []


# 3. The steps: keys and momentum move once for each real one.


@every_engine
def test_steps_accumulated_batches_are_one(engine: str, tmp_path: Path) -> None:
    method, plain = build(queue_size=60), build(queue_size=60)
    steps, outcome = train(engine, tmp_path, method, options=ACCUMULATE[engine])
    expected = plain_loop(plain, accumulate=2)
    assert [step for step, _ in steps] == [1, 2, 3, 4]
    assert [loss for _, loss in steps] == pytest.approx([loss for _, loss in expected], rel=1e-6)
    assert outcome.steps == method.steps == method.total_steps == 4
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(method.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


# 4. Resume: a job that was killed ends bit for bit like one that was not.


@pytest.mark.parametrize("make", [loader_of, plain_loader], ids=["seeded", "plain"])
@every_engine
def test_resume_after_an_epoch(engine: str, make: Any, tmp_path: Path) -> None:
    def die(epoch: int) -> None:
        torch.rand(3)  # an evaluation may draw random numbers, and be unlike in the resumed run
        if epoch == 2:
            raise Stop

    whole, again = build(), build()
    expected, _ = train(engine, tmp_path / "whole", whole, loader=make(), epochs=3)
    with pytest.raises(Stop):  # killed during the evaluation after epoch 2: epoch 1 is on disk
        train(engine, tmp_path / "cut", build(), loader=make(), epochs=3, on_epoch=die)
    torch.manual_seed(123)
    steps, outcome = train(engine, tmp_path / "cut", again, loader=make(), epochs=3)
    assert (steps, outcome.steps, outcome.steps_now) == (expected[4:], 12, 8)
    assert differing(whole, again) == []
    assert all(path.exists() for path in outcome.checkpoints)
    done = build()
    steps, outcome = train(engine, tmp_path / "cut", done, loader=make(), epochs=3)  # nothing is left to do
    assert (steps, outcome.steps, outcome.steps_now, differing(whole, done)) == ([], 12, 0, [])
    assert train(engine, tmp_path / "cut", build(), epochs=1, resume=False)[1].steps_now == 4


@pytest.mark.parametrize("last", [2, 6, 8])  # 4 steps an epoch: in the first, in the second, at its very end
@every_engine
def test_resume_within_an_epoch(engine: str, last: int, tmp_path: Path) -> None:
    def die(step: int, loss: float) -> None:
        if step == last:
            raise KeyboardInterrupt  # as Ctrl-C does

    whole, again = build(), build()
    expected, _ = train(engine, tmp_path / "whole", whole)
    with pytest.raises(KeyboardInterrupt):
        train(engine, tmp_path / "cut", build(), checkpoint_minutes=0, on_step=die)
    assert train(engine, tmp_path / "cut", again)[0] == expected[last - 1 :]
    assert differing(whole, again) == []


@every_engine
def test_resume_a_checkpoint_is_kept_when_the_minutes_have_passed_and_not_before(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, kept, steps = [0.0], [], [0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def on_step(step: int, loss: float) -> None:
        steps[0] = step
        now[0] += 60  # a step takes a minute

    train(engine, tmp_path, build(), checkpoint_minutes=3, on_step=on_step, on_checkpoint=lambda: kept.append(steps[0]))
    assert kept == [3, 7]  # the end of each epoch of 4 steps has a checkpoint of its own


@every_engine
def test_resume_what_goes_wrong_before_a_checkpoint_leaves_the_last_one(engine: str, tmp_path: Path) -> None:
    calls = []

    def full() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    expected, _ = train(engine, tmp_path / "whole", build())
    with pytest.raises(OSError, match="No space left"):
        train(engine, tmp_path / "cut", build(), checkpoint_minutes=0, on_checkpoint=full)
    assert train(engine, tmp_path / "cut", build())[0] == expected[2:]
    assert not list((tmp_path / "cut").glob("*.partial"))


# 5. Processes: two train what one trains on the joined batch.


def train_on(
    devices: int, engine: str, folder: Path, gather: str = "whole", started: bool = True
) -> tuple[dict[str, Any], Steps, list[int]]:
    if devices > 1 and started:  # as torchrun says it
        rank, world = str(distributed.rank()), str(distributed.world_size())
        os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank)
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))
    moco = MoCo(backbone, 16, "v2+", queue_size=70, projection_dim=8, momentum=0.9, gather=gather)
    epochs: list[int] = []
    loader = loader_of(views=jobs.FixedViews())
    steps, _ = train(engine, folder, moco, loader=loader, devices=devices, on_epoch=epochs.append)
    return moco.state_dict(), steps, epochs


@pytest.mark.parametrize("gather", ["whole", "sharded"])
@every_engine
def test_processes_two_are_one(engine: str, gather: str, two_ranks: Ranks, tmp_path: Path) -> None:
    one, steps, epochs = train_on(1, engine, tmp_path / "one")
    first, second = two_ranks.run(train_on, 2, engine, tmp_path / "two", gather)
    assert [step for step, _ in first[1]] == [step for step, _ in steps] == list(range(1, 9))
    assert first[2] == epochs == [1, 2]
    assert (second[1], second[2]) == ([], [])  # callbacks are the first process's
    for name, value in one.items():
        assert torch.equal(first[0][name], second[0][name]), name
        torch.testing.assert_close(first[0][name], value, atol=1e-5, rtol=1e-4, msg=name)


STARTED = """
import os, pathlib, sys, torch
from test_every_adapter import train_on
torch.set_num_threads(1)
folder = pathlib.Path(sys.argv[2])
answer = train_on(2, sys.argv[1], folder, started=False)
path = folder / f"answer.{os.environ['LOCAL_RANK']}"
torch.save(answer, f"{path}.part")
os.replace(f"{path}.part", path)
os._exit(0)
"""


# bench/test_long_runs.py does it with these: starting processes is slow.
STARTED_THERE = ("lightning", "mmengine")


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine.values[0] not in STARTED_THERE])
def test_processes_are_started_where_nobody_has(engine: str, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(STARTED)
    here = Path(__file__).parent
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{here}:{here.parent / 'support'}"}
    command = [sys.executable, str(tmp_path / "job.py"), engine, str(tmp_path)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    answers = [tmp_path / f"answer.{rank}" for rank in range(2)]
    deadline = time.monotonic() + 30
    while not all(answer.exists() for answer in answers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(answer.exists() for answer in answers), run.stderr[-4000:]
    one, steps, _ = train_on(1, engine, tmp_path / "one")
    for answer in answers:
        state, told, _ = torch.load(answer)
        assert [step for step, _ in told] == ([step for step, _ in steps] if answer.suffix == ".0" else [])
        for name, value in one.items():
            torch.testing.assert_close(state[name], value, atol=1e-5, rtol=1e-4, msg=name)
