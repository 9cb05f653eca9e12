"""``moco-plugins train``: real Runners on real digits, resumed, accumulated, averaged, logged."""

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


def weights(work, name="epoch_3.pth"):
    return torch.load(work / name, weights_only=False)["state_dict"]


def equal(a, b):
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def text(work):
    return "".join(path.read_text() for path in sorted(work.rglob("scalars.json")))


def test_a_run_and_what_it_leaves(train, config):
    config = config.replace("default_hooks = dict(", "default_hooks = dict(checkpoint=dict(type='CheckpointHook', "
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
def test_a_resumed_run_is_bit_identical(train, more, config):
    whole = train("whole", config=config + more)
    stop = "custom_hooks = [dict(type='EMAHook'), dict(type='StopAfter', epoch=2)]\n"
    stop = stop if more else stop.replace("dict(type='EMAHook'), ", "")
    with pytest.raises(KeyboardInterrupt):
        train("cut", config=config + stop)
    cut = train("cut", "--resume", config=config + more)
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


def test_a_resumed_iteration_loop_is_bit_identical(train, config):
    whole = train("whole", config=config + ITERATIONS)
    with pytest.raises(KeyboardInterrupt):
        train("cut", config=config + ITERATIONS + "custom_hooks = [dict(type='StopAfter', iteration=6)]\n")
    cut = train("cut", "--resume", str(whole.parent / "cut" / "iter_4.pth"), config=config + ITERATIONS)
    assert not equal(weights(whole, "iter_8.pth"), weights(cut, "iter_8.pth"))


def test_workers_draw_anew_each_epoch_and_the_same_after_a_resume(train, config):
    config = config.replace("dict(type='moco_plugins.TwoViews', variant='v2', image_size=8)", "dict(type='Chance')")
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


def test_beside_emahook_the_trained_model_is_the_same_and_its_queue_is_kept(train, config):
    plain = torch.load(train("plain") / "epoch_3.pth", weights_only=False)["state_dict"]
    saved = torch.load(
        train("averaged", config=config + "custom_hooks = [dict(type='EMAHook')]\n") / "epoch_3.pth", weights_only=False
    )
    trained = {k.removeprefix("module."): v for k, v in saved["ema_state_dict"].items() if k.startswith("module.")}
    weight = "method.query_encoder.backbone.0.weight"
    assert torch.equal(trained[weight], plain[weight])  # EMAHook stores the trained weights there
    assert not torch.equal(saved["state_dict"][weight], plain[weight])
    for name in ("method.queue.keys", "method.queue.ptr", "method.steps"):
        assert torch.equal(saved["state_dict"][name], plain[name]), name


@pytest.fixture
def smooth(config):
    """The config without chance and without BatchNorm."""
    return (
        config.replace(
            "dict(type='moco_plugins.Backbone', name='convnet', channels=1, image_size=8)",
            "dict(type='smooth_backbone'), feature_dim=24",
        )
        .replace("dict(type='moco_plugins.TwoViews', variant='v2', image_size=8)", "dict(type='Mirror')")
        .replace("type='AdamW', lr=1e-3", "type='SGD', lr=0.1, momentum=0.9")
        .replace("param_scheduler", "unused")
        .replace("limit=120", "limit=128")
    )


def test_accumulated_small_batches_are_one_large_batch(train, smooth):
    options = ["train_dataloader.batch_size=8", "optim_wrapper.accumulative_counts=4"]
    small = weights(train("small", "--no-validate", "--cfg-options", *options, config=smooth))
    large = weights(train("large", "--no-validate", config=smooth))
    assert int(small["method.steps"]) == int(large["method.steps"]) == 12
    for name, value in large.items():
        torch.testing.assert_close(small[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_mixed_precision_on_the_cpu(train):
    work = train("amp", "--amp", "--no-validate")
    assert "AutocastOptimWrapper" in (work / "amp.py").read_text()
    assert all(torch.isfinite(value).all() for value in weights(work).values() if value.is_floating_point())
    assert weights(work)["method.queue.keys"].dtype == torch.float32


def test_wrong_command_lines(train, tmp_path):
    with pytest.raises(SystemExit, match=r"nothing\.py does not exist"):
        main([str(tmp_path / "nothing.py")])
    with pytest.raises(SystemExit, match="no such file"):
        train("a", "--resume", "nothing.pth")
    with pytest.raises(SystemExit, match="base_batch_size"):
        train("a", "--auto-scale-lr")
    with pytest.raises(RuntimeError, match=r"RANK.*not set.*torchrun"):
        train("a", "--launcher", "pytorch")
