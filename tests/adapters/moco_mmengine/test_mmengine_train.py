"""``moco-plugins train``: real Runners on real digits, resumed, accumulated, averaged, logged."""

import argparse
import pickle
from pathlib import Path
from typing import ClassVar

import pytest
import torch

pytest.importorskip("mmengine")
pytest.importorskip("sklearn")

from mmengine.hooks import Hook
from mmengine.registry import HOOKS, MODELS, TRANSFORMS
from moco_mmengine.train import main

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:the features have collapsed")  # of untrained networks on tiny images

CONFIG = """
custom_imports = dict(imports=['moco_plugins'], allow_failed_imports=False)
model = dict(
    type='moco_plugins.MoCo', queue_size=100, projection_dim=16, momentum=0.9, metrics_interval=2,
    backbone=dict(type='moco_plugins.Backbone', name='convnet', channels=1, image_size=8))
train_dataloader = dict(
    dataset=dict(type='moco_plugins.digits', limit=120,
                 pipeline=[dict(type='moco_plugins.TwoViews', variant='v2', image_size=8)]),
    batch_size=32, sampler=dict(type='DefaultSampler', shuffle=True))
val_dataloader = dict(
    dataset=dict(type='moco_plugins.digits', split='train+test', limit=60), batch_size=50,
    sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = [dict(type='moco_plugins.KNNMetric', k=5), dict(type='moco_plugins.LinearProbeMetric', strengths=[1.0])]
train_cfg = dict(by_epoch=True, max_epochs=3)
val_cfg = dict()
optim_wrapper = dict(optimizer=dict(type='AdamW', lr=1e-3))
param_scheduler = dict(type='CosineAnnealingLR', T_max=20, by_epoch=False)
default_hooks = dict(logger=dict(type='LoggerHook', interval=2))
randomness = dict(seed=1)
log_level = 'WARNING'
"""
ITERATIONS = """
train_dataloader['sampler'] = dict(type='InfiniteSampler', shuffle=True)
train_cfg = dict(by_epoch=False, max_iters=8, val_interval=4)
default_hooks['checkpoint'] = dict(type='CheckpointHook', interval=4, by_epoch=False)
log_processor = dict(by_epoch=False)
"""


@HOOKS.register_module()
class StopAfter(Hook):
    """Stands for a machine that goes down."""

    priority = "LOWEST"

    def __init__(self, epoch=None, iteration=None):
        self.epoch, self.iteration = epoch, iteration

    def after_train_epoch(self, runner):
        if self.epoch == runner.epoch + 1:
            raise KeyboardInterrupt

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if self.iteration == runner.iter + 1:
            raise KeyboardInterrupt


@TRANSFORMS.register_module()
class Mirror:
    """Two views without chance."""

    def __call__(self, sample):
        image = sample["img"].float() / 255
        return {"inputs": [image, image.flip(-1)]}


@MODELS.register_module()
def smooth_backbone():
    """Without BatchNorm, so that a batch may be split."""
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 24))


@TRANSFORMS.register_module()
class Chance:
    """Two views of nothing but chance."""

    def __call__(self, sample):
        return {"inputs": [torch.rand(1, 8, 8), torch.rand(1, 8, 8)]}


@HOOKS.register_module()
class Remember(Hook):
    """The first number of each batch, by epoch."""

    seen: ClassVar = {}

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        first = float(data_batch["inputs"][0][0].flatten()[0])
        self.seen.setdefault(runner.experiment_name.split("_2")[0], {}).setdefault(runner.epoch, []).append(first)


@pytest.fixture
def train(tmp_path):
    def run(name, *options, config=CONFIG):
        path = tmp_path / f"{name}.py"
        path.write_text(config)
        work = tmp_path / name
        assert main([str(path), "--work-dir", str(work), *options]) == 0
        return work

    return run


def weights(work, name="epoch_3.pth"):
    return torch.load(work / name, weights_only=False)["state_dict"]


def equal(a, b):
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def text(work):
    return "".join(path.read_text() for path in sorted(work.rglob("scalars.json")))


def test_a_run_and_what_it_leaves(train):
    config = CONFIG.replace("default_hooks = dict(", "default_hooks = dict(checkpoint=dict(type='CheckpointHook', "
                            "interval=1, save_best='knn/top1'), ")  # fmt: skip
    config += (
        "visualizer = dict(type='Visualizer', vis_backends=[dict(type='LocalVisBackend'), "
        "dict(type='TensorboardVisBackend')])\n"
    )
    work = train("whole", config=config)
    assert {path.name for path in work.glob("*.pth")} >= {"epoch_1.pth", "epoch_2.pth", "epoch_3.pth"}
    assert list(work.glob("best_knn_top1_epoch_*.pth"))
    log = text(work)
    for name in ("loss", "queue_filled", "positive_cosine", "knn/top1", "linear/top1"):
        assert f'"{name}"' in log
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = next(work.rglob("events.out.tfevents*"))
    board = event_accumulator.EventAccumulator(str(events)).Reload()
    assert {"loss", "queue_filled", "knn/top1"} <= set(board.Tags()["scalars"])


def test_validation_changes_nothing(train):
    assert not equal(weights(train("with")), weights(train("without", "--no-validate")))


@pytest.mark.parametrize("more", ["", "custom_hooks = [dict(type='EMAHook')]\n"], ids=["", "EMAHook"])
def test_a_resumed_run_is_bit_identical(train, more):
    whole = train("whole", config=CONFIG + more)
    stop = "custom_hooks = [dict(type='EMAHook'), dict(type='StopAfter', epoch=2)]\n"
    stop = stop if more else stop.replace("dict(type='EMAHook'), ", "")
    with pytest.raises(KeyboardInterrupt):
        train("cut", config=CONFIG + stop)
    cut = train("cut", "--resume", config=CONFIG + more)
    a, b = (torch.load(work / "epoch_3.pth", weights_only=False) for work in (whole, cut))
    assert not equal(a["state_dict"], b["state_dict"])
    assert int(a["state_dict"]["method.steps"]) == 12
    for name, state in a["optimizer"]["state"].items():
        assert all(torch.equal(state[k], b["optimizer"]["state"][name][k]) for k in state)
    assert a["param_schedulers"] == b["param_schedulers"]
    losses = [torch.load(w / "epoch_3.pth", weights_only=False)["message_hub"]["log_scalars"] for w in (whole, cut)]
    assert losses[0]["train/loss"].data[0].tolist() == losses[1]["train/loss"].data[0].tolist()
    if more:
        assert not equal(a["ema_state_dict"], b["ema_state_dict"])


def test_a_resumed_iteration_loop_is_bit_identical(train):
    whole = train("whole", config=CONFIG + ITERATIONS)
    with pytest.raises(KeyboardInterrupt):
        train("cut", config=CONFIG + ITERATIONS + "custom_hooks = [dict(type='StopAfter', iteration=6)]\n")
    cut = train("cut", "--resume", str(whole.parent / "cut" / "iter_4.pth"), config=CONFIG + ITERATIONS)
    assert not equal(weights(whole, "iter_8.pth"), weights(cut, "iter_8.pth"))


def test_workers_draw_anew_each_epoch_and_the_same_after_a_resume(train):
    config = CONFIG.replace("dict(type='moco_plugins.TwoViews', variant='v2', image_size=8)", "dict(type='Chance')")
    config += "train_dataloader['num_workers'] = 1\ncustom_hooks = [dict(type='Remember')]\n"
    Remember.seen.clear()
    train("whole", "--no-validate", config=config)
    stop = "custom_hooks = [dict(type='Remember'), dict(type='StopAfter', epoch=2)]\n"
    with pytest.raises(KeyboardInterrupt):
        train("cut", "--no-validate", config=config + stop)
    train("cut", "--no-validate", "--resume", config=config)
    whole, cut = Remember.seen["whole"], Remember.seen["cut"]
    assert whole == cut
    assert len({number for numbers in whole.values() for number in numbers}) == 12


def test_beside_emahook_the_trained_model_is_the_same_and_its_queue_is_kept(train):
    plain = torch.load(train("plain") / "epoch_3.pth", weights_only=False)["state_dict"]
    saved = torch.load(
        train("averaged", config=CONFIG + "custom_hooks = [dict(type='EMAHook')]\n") / "epoch_3.pth", weights_only=False
    )
    trained = {k.removeprefix("module."): v for k, v in saved["ema_state_dict"].items() if k.startswith("module.")}
    weight = "method.query_encoder.backbone.0.weight"
    assert torch.equal(trained[weight], plain[weight])  # EMAHook stores the trained weights there
    assert not torch.equal(saved["state_dict"][weight], plain[weight])
    for name in ("method.queue.keys", "method.queue.ptr", "method.steps"):
        assert torch.equal(saved["state_dict"][name], plain[name]), name


SMOOTH = (
    CONFIG.replace(
        "dict(type='moco_plugins.Backbone', name='convnet', channels=1, image_size=8)",
        "dict(type='smooth_backbone'), feature_dim=24",
    )
    .replace("dict(type='moco_plugins.TwoViews', variant='v2', image_size=8)", "dict(type='Mirror')")
    .replace("type='AdamW', lr=1e-3", "type='SGD', lr=0.1, momentum=0.9")
    .replace("param_scheduler", "unused")
)


def test_accumulated_small_batches_are_one_large_batch(train):
    options = ["train_dataloader.batch_size=8", "optim_wrapper.accumulative_counts=4"]
    small = weights(
        train("small", "--no-validate", "--cfg-options", *options, config=SMOOTH.replace("limit=120", "limit=128"))
    )
    large = weights(train("large", "--no-validate", config=SMOOTH.replace("limit=120", "limit=128")))
    assert int(small["method.steps"]) == int(large["method.steps"]) == 12
    for name, value in large.items():
        torch.testing.assert_close(small[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_mixed_precision_on_the_cpu(train):
    work = train("amp", "--amp", "--no-validate")
    assert "AutocastOptimWrapper" in (work / "amp.py").read_text()
    assert all(torch.isfinite(value).all() for value in weights(work).values() if value.is_floating_point())
    assert weights(work)["method.queue.keys"].dtype == torch.float32


def test_a_checkpoint_of_another_model_is_refused(train):
    work = train("first", "--no-validate", "--cfg-options", "train_cfg.max_epochs=1")
    more = ["--resume", str(work / "epoch_1.pth"), "--no-validate", "--cfg-options"]
    with pytest.raises(ValueError, match=r"its queue has 100 keys and this one 50 \(queue_size=100"):
        train("queue", *more, "model.queue_size=50")
    with pytest.raises(ValueError, match=r"does not fit this model.*(lacks|shape)"):
        train("variant", *more, "model.variant=v1")
    with pytest.raises(ValueError, match=r"it has .*method\.queue"):
        train("method", *more, "model.type=moco_plugins.moco-v3", "model.queue_size=0", "model.hidden_dim=32")
    kept = train("newest", *more, "model.queue_size=50", "model.queue_resize=keep_newest", "train_cfg.max_epochs=2")
    assert weights(kept, "epoch_2.pth")["method.queue.keys"].shape == (50, 16)
    foreign = work / "foreign.pth"
    checkpoint = torch.load(work / "epoch_1.pth", weights_only=False)
    checkpoint["state_dict"] = {"moco.encoder.weight": torch.zeros(2)}
    torch.save(checkpoint, foreign)
    with pytest.raises(ValueError, match=r"no weight in common.*moco\.encoder\.weight"):
        train("foreign", "--resume", str(foreign), "--no-validate")
    torch.save({"state_dict": weights(work, "epoch_1.pth"), "pytorch-lightning_version": "2.6.6"}, foreign)
    with pytest.raises(ValueError, match=r"has state_dict, pytorch-lightning_version: MMEngine did not save it"):
        train("lightning", "--resume", str(foreign), "--no-validate")


class Surprise:
    def __reduce__(self):
        return (argparse.Namespace, ())


def test_a_checkpoint_that_could_run_code_needs_trust(train):
    work = train("first", "--no-validate", "--cfg-options", "train_cfg.max_epochs=1")
    checkpoint = torch.load(work / "epoch_1.pth")  # under torch's own default
    checkpoint["surprise"] = Surprise()
    torch.save(checkpoint, work / "odd.pth")
    again = ["--resume", str(work / "odd.pth"), "--no-validate", "--cfg-options", "train_cfg.max_epochs=2"]
    with pytest.raises(SystemExit, match=r"argparse\.Namespace.*--trust-checkpoint"):
        train("refused", *again)
    assert (train("trusted", "--trust-checkpoint", *again) / "epoch_2.pth").exists()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(work / "odd.pth")


def test_the_door_that_lets_mmengines_log_in_lets_nothing_else_in(tmp_path):
    from moco_mmengine.checkpoints import _statistic

    with pytest.raises(pickle.UnpicklingError, match="not allowed"):
        _statistic(argparse.Namespace, "__init__")

    class Evil:
        def __reduce__(self):
            return (getattr, (Path, "home"))

    torch.save({"x": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "evil.pth")


def test_wrong_command_lines(train, tmp_path):
    with pytest.raises(SystemExit, match=r"nothing\.py does not exist"):
        main([str(tmp_path / "nothing.py")])
    with pytest.raises(SystemExit, match="no such file"):
        train("a", "--resume", "nothing.pth")
    with pytest.raises(SystemExit, match="base_batch_size"):
        train("a", "--auto-scale-lr")
    with pytest.raises(RuntimeError, match=r"RANK.*not set.*torchrun"):
        train("a", "--launcher", "pytorch")


def test_anybodys_runner_resumes_too(tmp_path):
    """Without our command or hook: a plain Runner of a config that names moco_plugins."""
    from mmengine.config import Config
    from mmengine.runner import Runner

    (tmp_path / "own.py").write_text(CONFIG)
    cfg = Config.fromfile(tmp_path / "own.py")
    cfg.merge_from_dict({"work_dir": str(tmp_path / "work"), "train_cfg.max_epochs": 1})
    Runner.from_cfg(cfg).train()
    cfg.merge_from_dict({"resume": True, "train_cfg.max_epochs": 2, "experiment_name": "again"})
    runner = Runner.from_cfg(cfg)
    runner.train()
    assert runner.model.method.steps == 8
    assert runner.model.method.total_steps == 8
