"""What users of MMEngine do besides a Runner by epochs: each works, or says what to do instead."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

pytest.importorskip("mmengine")

from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseDataPreprocessor, BaseModule, ImgDataPreprocessor
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import DATASETS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS, TRANSFORMS
from mmengine.runner import FlexibleRunner, Runner
from moco_mmengine import DataPreprocessor, MoCo
from moco_mmengine.batches import PerView, check_views

CONVNET = {"type": "moco_plugins.Backbone", "name": "convnet", "channels": 1, "image_size": 8}
MODEL = {
    "type": "moco_plugins.MoCo",
    "queue_size": 64,
    "projection_dim": 16,
    "momentum": {"start": 0.9, "end": 1.0},
    "backbone": CONVNET,
}
VIEWS = {"type": "moco_plugins.TwoViews", "variant": "v2", "image_size": 8}
LOADER = {
    "dataset": {"type": "moco_plugins.digits", "limit": 120, "pipeline": [VIEWS]},
    "batch_size": 32,
    "sampler": {"type": "DefaultSampler", "shuffle": True},
}
INFINITE = {**LOADER, "sampler": {"type": "InfiniteSampler", "shuffle": True}}
VALIDATION = {
    "val_dataloader": {
        "dataset": {"type": "moco_plugins.digits", "split": "train+test", "limit": 60},
        "batch_size": 50,
        "sampler": {"type": "DefaultSampler", "shuffle": False},
    },
    "val_evaluator": {"type": "moco_plugins.KNNMetric", "k": 5},
    "val_cfg": {},
}
_runs = iter(range(10**6))


class Validations(Hook):
    """Notes when the Runner validates."""

    def __init__(self) -> None:
        self.at: list[int] = []

    def before_val(self, runner):
        self.at.append(runner.iter)


@pytest.fixture
def runner(tmp_path):
    """Build a Runner of a small config, by its settings."""

    def build(kind=Runner, hooks=(), **settings):
        defaults = {
            "model": MODEL,
            "work_dir": str(tmp_path),
            "train_dataloader": LOADER,
            "train_cfg": {"by_epoch": True, "max_epochs": 2},
            "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-3}},
            "randomness": {"seed": 1},
            "env_cfg": {},
            "log_level": "ERROR",
            "experiment_name": f"habits-{next(_runs)}",
        }
        given = {name: copy.deepcopy(value) for name, value in {**defaults, **settings}.items() if value is not None}
        built = kind.from_cfg(Config({**given, "custom_hooks": [{"type": "moco_plugins.MethodHook"}]}))
        for hook in hooks:
            built.register_hook(hook)
        return built

    return build


def trained(runner) -> dict[str, torch.Tensor]:
    runner.train()
    model = runner.model
    method = getattr(model, "_orig_mod", model).method
    assert method.total_steps == method.steps > 0
    assert method.momentum == pytest.approx(1.0)
    return method.state_dict()


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=1e-6) for name in a)


@pytest.mark.slow
def test_compile_trains_as_without_it(runner):
    torch._dynamo.reset()
    few = {"train_cfg": {"by_epoch": True, "max_epochs": 1}, "optim_wrapper": {"optimizer": {"type": "SGD", "lr": 0.1}}}
    few["train_dataloader"] = {**LOADER, "dataset": {**LOADER["dataset"], "limit": 65}, "drop_last": True}
    assert same(trained(runner(compile={"backend": "eager"}, **few)), trained(runner(**few)))


@pytest.mark.parametrize(
    "settings",
    [{}, {"compile": {"backend": "eager"}}, {"strategy": {"type": "SingleDeviceStrategy"}}],
    ids=["default", "compile", "strategy"],
)
def test_a_flexible_runner_trains_as_a_runner(settings, runner):
    torch._dynamo.reset()
    assert same(trained(runner(FlexibleRunner, **settings)), trained(runner()))


def test_accumulation_in_a_flexible_runner(runner):
    wrapper = {"optimizer": {"type": "AdamW", "lr": 1e-3}, "accumulative_counts": 2}
    state = trained(runner(FlexibleRunner, optim_wrapper=wrapper))
    assert int(state["steps"]) == 4


def test_the_average_of_emahook_lies_beside_the_training(runner):
    averaged = runner(hooks=[{"type": "EMAHook", "momentum": 0.1}])
    assert same(trained(averaged), trained(runner()))
    ema = next(hook for hook in averaged.hooks if type(hook).__name__ == "EMAHook")
    weight = ema.ema_model.module.method.query_encoder.backbone[0].weight
    assert not torch.equal(weight, averaged.model.method.query_encoder.backbone[0].weight)
    assert int(ema.ema_model.module.method.steps) == 0  # a copy is no training


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class BackboneAndHead:
    """An optimiser for the backbone, another one for the head."""

    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        self.counts = optim_wrapper_cfg.get("counts", 1)

    def __call__(self, model):
        query = model.method.query_encoder
        optimizers = {name: torch.optim.AdamW(part.parameters(), 1e-3) for name, part in query.named_children()}
        return OptimWrapperDict(
            **{name: OptimWrapper(optimizer, accumulative_counts=self.counts) for name, optimizer in optimizers.items()}
        )


def test_several_optimisers_step_together(runner):
    assert same(trained(runner(optim_wrapper={"constructor": "BackboneAndHead"})), trained(runner()))
    with pytest.raises(ValueError, match=r"accumulative_counts=2.*paramwise_cfg"):
        runner(optim_wrapper={"constructor": "BackboneAndHead", "counts": 2}).train()


def test_a_loop_by_iterations(runner):
    seen = Validations()
    loop = {"type": "IterBasedTrainLoop", "max_iters": 8, "val_interval": 3}
    trained(runner(train_cfg=loop, train_dataloader=INFINITE, hooks=[seen], **VALIDATION))
    assert seen.at == [3, 6, 8]


def test_intervals_that_change(runner):
    seen = Validations()
    loop = {"type": "IterBasedTrainLoop", "max_iters": 8, "val_interval": 4, "dynamic_intervals": [(6, 1)]}
    trained(runner(train_cfg=loop, train_dataloader=INFINITE, hooks=[seen], **VALIDATION))
    assert seen.at == [4, 5, 6, 7, 8]
    seen = Validations()
    loop = {"by_epoch": True, "max_epochs": 4, "val_interval": 2, "dynamic_intervals": [(3, 1)]}
    trained(runner(train_cfg=loop, hooks=[seen], **VALIDATION))
    assert seen.at == [8, 12, 16]


def test_validation_without_training(runner):
    nothing = dict.fromkeys(("train_dataloader", "train_cfg", "optim_wrapper"))
    alone = runner(**nothing, **VALIDATION)
    before = copy.deepcopy(alone.model.state_dict())
    metrics = alone.val()
    assert 0 <= metrics["knn/top1"] <= 1
    assert all(torch.equal(value, before[name]) for name, value in alone.model.state_dict().items())


@MODELS.register_module()
class OwnStep(MoCo):
    """A user's own training step."""

    def train_step(self, data, optim_wrapper):
        with optim_wrapper.optim_context(self):
            data = self.data_preprocessor(data, True)
            losses = self(**data, mode="loss")
        loss, log_vars = self.parse_losses(losses)
        optim_wrapper.update_params(loss)
        return {**log_vars, "own": loss.detach()}


def test_an_overridden_train_step_trains_the_same(runner):
    assert same(trained(runner(model={**MODEL, "type": "OwnStep"})), trained(runner()))


@MODELS.register_module()
class ListOfViews(ImgDataPreprocessor):
    """As mmpretrain's SelfSupDataPreprocessor: of one view it makes a list of one."""

    def forward(self, data, training=False):
        result = super().forward(data, training)
        return {**result, "inputs": [result["inputs"]]}


@TRANSFORMS.register_module()
class InputsAlone:
    def __call__(self, sample):
        return {"inputs": sample["inputs"]}


@pytest.mark.parametrize(
    "foreign",
    [
        {"type": "mmengine.ImgDataPreprocessor", "mean": [0.0], "std": [1.0]},
        {"type": "ListOfViews"},
        {"type": "mmengine.BaseDataPreprocessor"},
    ],
    ids=lambda config: config["type"],
)
@pytest.mark.parametrize("collate", ["pseudo_collate", "default_collate"])
def test_data_preprocessors_of_other_projects(foreign, collate, runner):
    pipeline = [*LOADER["dataset"]["pipeline"], {"type": "InputsAlone"}]
    loader = {**LOADER, "dataset": {**LOADER["dataset"], "pipeline": pipeline}, "collate_fn": {"type": collate}}
    state = trained(runner(model={**MODEL, "data_preprocessor": foreign}, train_dataloader=loader))
    assert same(state, trained(runner(train_dataloader=loader)))


def test_a_foreign_preprocessor_for_images_is_called_for_each_view():
    model = MODELS.build({**MODEL, "data_preprocessor": {"type": "ListOfViews", "mean": [1.0], "std": [2.0]}})
    assert isinstance(model.data_preprocessor, PerView)
    views = [torch.rand(4, 1, 8, 8), torch.rand(4, 1, 8, 8)]
    data = model.data_preprocessor({"inputs": views, "data_samples": None}, True)
    assert all(torch.allclose(out, (x - 1) / 2) for out, x in zip(data["inputs"], views, strict=True))
    one = model.data_preprocessor({"inputs": views[0], "data_samples": [1, 2, 3, 4]})
    assert torch.allclose(one["inputs"], (views[0] - 1) / 2)


def test_what_a_preprocessor_leaves_unfit_names_the_cure():
    class Odd(BaseDataPreprocessor):
        def forward(self, data, training=False):
            return {"inputs": {"view": data["inputs"]}, "data_samples": None}

    model = MODELS.build({**MODEL, "data_preprocessor": Odd()})
    with pytest.raises(TypeError, match=r"inputs is a dict.*moco_plugins\.TwoViews"):
        model.train_step({"inputs": torch.rand(2, 1, 8, 8)}, OptimWrapper(torch.optim.SGD(model.parameters(), 0.1)))


# Volumes, clips, signals, vectors

SHAPES = {"volume": (2, 6, 8, 8), "signal": (2, 40), "vector": (12,), "image": (2, 8, 8)}


@DATASETS.register_module()
class Noise(Dataset):
    """24 samples of some shape, as two views."""

    def __init__(self, kind):
        generator = torch.Generator().manual_seed(0)
        self.first = torch.rand(24, *SHAPES[kind], generator=generator)
        self.second = self.first + 0.1 * torch.rand(24, *SHAPES[kind], generator=generator)

    def __len__(self):
        return len(self.first)

    def __getitem__(self, i):
        return {"inputs": [self.first[i], self.second[i]]}


def net(kind):
    if kind == "vector":
        return nn.Linear(12, 10)
    conv = {"volume": nn.Conv3d, "signal": nn.Conv1d, "image": nn.Conv2d}[kind]
    pool = {"volume": nn.AdaptiveAvgPool3d, "signal": nn.AdaptiveAvgPool1d, "image": nn.AdaptiveAvgPool2d}[kind]
    return nn.Sequential(conv(2, 10, 3), nn.ReLU(), pool(1), nn.Flatten())


@pytest.mark.parametrize("collate", ["pseudo_collate", "default_collate"])
@pytest.mark.parametrize("kind", SHAPES)
def test_whatever_a_backbone_takes_is_an_image(kind, collate, runner):
    loader = {**LOADER, "dataset": {"type": "Noise", "kind": kind}, "batch_size": 8, "collate_fn": {"type": collate}}
    given = {"backbone": net(kind), **({"feature_dim": 10} if kind == "vector" else {})}  # else it is found
    model = MODELS.build({**MODEL, **given, "queue_size": 20, "shuffle_bn": False})
    assert model.method.feature_dim == 10
    built = runner(train_dataloader=loader)
    built.model = model
    assert int(trained(built)["queue.filled"]) == 20


@pytest.mark.parametrize("kind", ["volume", "signal", "image"])
def test_a_preprocessor_normalises_channels_whatever_the_places(kind):
    preprocess = DataPreprocessor(mean=[0.5, 0.25], std=[0.5, 2.0])
    x = torch.rand(4, *SHAPES[kind])
    out = preprocess({"inputs": x, "data_samples": None})["inputs"]
    assert torch.allclose(out[:, 0], (x[:, 0] - 0.5) / 0.5)
    assert torch.allclose(out[:, 1], (x[:, 1] - 0.25) / 2)
    samples = preprocess({"inputs": list(x), "data_samples": [0, 1, 2, 3]})["inputs"]  # one view, not stacked
    assert torch.equal(samples, out)
    views = preprocess({"inputs": [x, x + 1], "data_samples": [0, 1, 2, 3]}, True)["inputs"]
    assert torch.equal(views[0], out)
    assert len(views) == 2


@MODELS.register_module()
class VideoMaps(BaseModule):
    """Maps of clips (N, D, T, H, W), in a tuple."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(2, 7, 3)

    def forward(self, x):
        return (self.conv(x),)


def test_maps_of_clips_are_averaged_over_time_and_place():
    model = MODELS.build({**MODEL, "backbone": {"type": "VideoMaps"}})
    clips = torch.rand(2, 2, 5, 8, 8)
    expected = model.method.query_encoder.backbone.backbone.conv(clips).mean((2, 3, 4))
    assert torch.allclose(model(clips), expected, atol=1e-6)
    assert len(check_views([clips, clips + 1])) == 2


def test_a_queue_as_large_as_the_data_set_is_told_once_with_a_suggestion(runner):
    class Kept(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    told = []
    for size in (120, 119):
        built = runner(model={**MODEL, "queue_size": size}, log_level="WARNING")
        built.logger.addHandler(Kept())
        built.train()
    told = [message for message in told if "queue_size=" in message]
    assert len(told) == 1
    assert told[0].startswith("queue_size=120 ")
    assert told[0].endswith("Try queue_size=16")
