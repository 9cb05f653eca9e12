"""The model: backbones and necks of every kind, three modes, options, errors, MMEngine's initialisation and log."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("mmengine")

from mmengine.logging import MessageHub
from mmengine.model import BaseModel, BaseModule
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS
from moco_mmengine import MoCo

from moco_plugins.hooks import manager as plugins

torch.set_num_threads(1)
CONVNET = {"type": "moco_plugins.Backbone", "name": "convnet", "channels": 1, "image_size": 16}


@MODELS.register_module()
class PyramidBackbone(BaseModule):
    """Returns the feature maps of its stages, as detection and mmpretrain backbones do."""

    def __init__(self, init_cfg=None):
        super().__init__(init_cfg)
        self.stages = nn.ModuleList([nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 24, 3, 2, 1)])

    def forward(self, x):
        maps = []
        for stage in self.stages:
            x = stage(x).relu()
            maps.append(x)
        return tuple(maps)


@MODELS.register_module()
class PoolNeck(nn.Module):
    def forward(self, maps):
        return tuple(m.amax((2, 3)) for m in maps)


@MODELS.register_module()
class ProjectionNeck(nn.Module):
    """Like mmpretrain's MoCoV2Neck: pools by itself, then projects."""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.mlp = nn.Sequential(nn.Linear(in_channels, 32), nn.ReLU(), nn.Linear(32, out_channels))

    def forward(self, maps):
        assert isinstance(maps, tuple)
        return (self.mlp(self.pool(maps[-1]).flatten(1)),)


def build(backbone, **options):
    torch.manual_seed(0)
    kind = options.pop("type", "moco_plugins.MoCo")
    options = {"queue_size": 32, **options} if kind.lower().startswith("moco_plugins.moco") else options
    return MODELS.build({"type": kind, "backbone": backbone, **options})


def views(channels=3, size=16, n=8):
    return [torch.rand(n, channels, size, size), torch.rand(n, channels, size, size)]


@pytest.mark.parametrize(
    ("backbone", "neck", "width", "channels"),
    [
        (CONVNET, None, 512, 1),
        ({"type": "moco_plugins.Backbone", "name": "resnet18"}, None, 512, 3),
        ({"type": "PyramidBackbone"}, None, 24, 3),
        ({"type": "PyramidBackbone"}, {"type": "PoolNeck"}, 24, 3),
        (PyramidBackbone(), None, 24, 3),
        (nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), None, 5, 3),
    ],
    ids=["by name", "torchvision", "tuple of maps", "pooling neck", "built, tuple", "built, vectors"],
)
def test_backbones(backbone, neck, width, channels):
    model = build(backbone, neck=neck, projection_dim=16)
    assert model.method.feature_dim == width
    assert model(views(channels), mode="loss")["loss"].requires_grad
    features = model(views(channels)[0])
    assert features.shape == (8, width)
    if neck is not None:  # its pooling is used, not ours
        x = views()[0]
        assert torch.equal(model(x), model.method.query_encoder.backbone.backbone(x)[-1].amax((2, 3)))


def test_timm_by_name():
    pytest.importorskip("timm")
    model = build({"type": "moco_plugins.Backbone", "name": "timm/test_vit", "image_size": 32}, projection_dim=16)
    assert model(views(size=32))[0].shape == (model.method.feature_dim,)


def test_a_neck_with_parameters_is_the_projection_head():
    neck = {"type": "ProjectionNeck", "in_channels": 24, "out_channels": 20}
    model = build({"type": "PyramidBackbone"}, neck=neck)
    assert model.method.queue.dim == 20
    query, key = model.method.query_encoder, model.method.key_encoder
    x = views()[0]
    assert torch.allclose(query(x), query.projector.neck(query.backbone.backbone(x))[0], atol=1e-6)
    assert torch.equal(query(x), key(x))
    assert not any(p.requires_grad for p in key.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = key.projector.neck.mlp[0].weight.clone()
    model(views(), mode="loss")["loss"].backward()
    optimizer.step()
    assert not torch.equal(before, key.projector.neck.mlp[0].weight)
    with pytest.raises(TypeError, match="own projection head"):
        build({"type": "PyramidBackbone"}, neck=neck, type="moco_plugins.SimCLR")


def test_every_method_is_a_type():
    for name in plugins.methods():
        assert issubclass(MODELS.get(f"moco_plugins.{name}"), BaseModel)


@pytest.mark.parametrize("kind", ["SimCLR", "BYOL", "MoCoV3", "moco-v1"])
def test_other_methods_train(kind):
    options = {"hidden_dim": 32, "queue_size": 0} if kind == "MoCoV3" else {}
    model = build(CONVNET, type=f"moco_plugins.{kind}", **options)
    assert isinstance(model, BaseModel)
    wrapper = OptimWrapper(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))
    assert torch.isfinite(model.train_step((views(1), torch.zeros(8)), wrapper)["loss"])


def test_predictions_say_what_the_metrics_need():
    model = build(CONVNET).eval()
    batch = {"inputs": views(1)[0], "data_samples": torch.arange(8)}
    predictions = model.val_step(batch)
    assert [p["label"] for p in predictions] == list(range(8))
    assert torch.equal(torch.stack([p["features"] for p in predictions]), model(batch["inputs"], mode="tensor"))
    with pytest.raises(ValueError, match="mode='guess'"):
        model(batch["inputs"], mode="guess")


def test_mmengines_initialisation_reaches_the_backbone_and_then_the_key_encoder():
    init = {"type": "Constant", "layer": "Conv2d", "val": 0.5, "bias": 0.25}
    model = build({"type": "PyramidBackbone", "init_cfg": init})
    model.init_weights()
    query = model.method.query_encoder.backbone.backbone.stages[0]
    assert (query.weight == 0.5).all()
    assert (query.bias == 0.25).all()
    model(views(), mode="loss")
    assert (model.method.key_encoder.backbone.backbone.stages[0].weight == 0.5).all()


def test_init_cfg_loads_weights_into_both_encoders(tmp_path):
    trained = build(CONVNET)
    torch.nn.init.normal_(trained.method.query_encoder.backbone[0].weight)
    torch.save({"state_dict": trained.state_dict()}, tmp_path / "weights.pth")
    model = build(CONVNET, init_cfg={"type": "Pretrained", "checkpoint": str(tmp_path / "weights.pth")})
    model.init_weights()
    model(views(1), mode="loss")
    for encoder in (model.method.query_encoder, model.method.key_encoder):
        assert torch.equal(encoder.backbone[0].weight, trained.method.query_encoder.backbone[0].weight)


def test_the_methods_metrics_are_in_the_log():
    hub = MessageHub.get_instance("metrics in the log")
    model = build(CONVNET, metrics_interval=2)
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(5):
        outputs = model.train_step({"inputs": views(1)}, wrapper)
    assert set(outputs) == {"loss"}
    logged = hub.get_scalar("train/queue_filled").data[0]
    assert len(logged) == 2  # after iterations 2 and 4
    assert logged[-1] == 0.75
    assert "train/loss" not in hub.log_scalars  # MMEngine's own
    hub.update_info("max_iters", 7)
    model.method.total_steps = None
    model.train_step(
        {"inputs": views(1)}, OptimWrapper(torch.optim.SGD(model.parameters(), 0.1), accumulative_counts=2)
    )
    assert model.method.total_steps == 4


def test_schedules_are_written_as_start_and_end():
    model = build(CONVNET, momentum={"start": 0.9, "end": 1.0}, total_steps=10)
    assert model.method.momentum == pytest.approx(0.9)
    model.load_state_dict({**model.state_dict(), "method.steps": torch.tensor(10)})
    assert model.method.momentum == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"momentum": 0.001}, r"MMEngine and mmpretrain count the other way round.*0\.999"),
        ({"queue_len": 64}, "queue_len=64.*here it is queue_size"),
        ({"feat_dim": 64}, "here it is projection_dim"),
        ({"temprature": 0.1}, r"temprature=0\.1 is not an option of moco_plugins\.MoCo; there are: .*temperature"),
    ],
)
def test_wrong_options_are_explained(options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        build(CONVNET, **options)


@pytest.mark.parametrize(
    ("backbone", "error", "text"),
    [
        ({"name": "resnet18"}, KeyError, "must contain the key.*moco_plugins.Backbone"),
        ({"type": "NoSuchNet"}, KeyError, "NoSuchNet is not in the mmengine::model registry.*custom_imports"),
        ("resnet18", TypeError, "backbone='resnet18' is a str"),
        ({"type": "moco_plugins.Backbone", "name": "resnet81"}, LookupError, "Did you mean resnet"),
        ({"type": "PyramidBackbone", "depth": 3}, TypeError, "depth"),
    ],
)
def test_wrong_backbones_are_explained(backbone, error, text):
    with pytest.raises(error, match=text):
        build(backbone)


def test_a_backbone_that_cannot_be_tried_says_what_to_give():
    picky = nn.Sequential(nn.Flatten(), nn.Linear(48, 8))
    with pytest.raises(ValueError, match="feature_dim="):
        build(picky)
    assert build(picky, feature_dim=8)(views(size=4)).shape == (8, 8)


def test_a_backbone_that_cannot_be_copied_is_built_twice():
    @MODELS.register_module(force=True)
    class Uncopyable(PyramidBackbone):
        def __deepcopy__(self, memo):
            raise RuntimeError("it holds a file")

    backbone = {"type": "Uncopyable"}
    with pytest.raises(TypeError, match="pass it as key_encoder="):
        build(backbone)
    model = build(backbone, key_encoder=backbone)
    x = views()[0]
    assert torch.equal(model.method.query_encoder(x), model.method.key_encoder(x))


def test_an_unknown_type_lists_what_there_is():
    with pytest.raises(KeyError, match=r"moco_plugins\.MoCa is not known among MODELS.*MoCo.*simclr"):
        MODELS.build({"type": "moco_plugins.MoCa"})
    assert MODELS.get("moco_plugins.MoCo") is MoCo
    assert "SimCLR" in MODELS.children["moco_plugins"]
    assert "MoCa" not in MODELS.children["moco_plugins"]


def test_the_class_without_framework_is_not_taken_for_ours():
    from moco_plugins import MoCo as Core

    with pytest.raises(TypeError, match=r"backbone=.*must be a torch\.nn\.Module"):
        MODELS.build({"type": Core, "backbone": CONVNET, "feature_dim": 512})


class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(20, 16)

    def forward(self, batch):
        mask = batch["mask"][:, :, None]
        return (self.table(batch["input_ids"]) * mask).sum(1) / mask.sum(1)


def test_views_may_be_dicts_of_tensors_and_labels_go_along():
    from moco_mmengine.models import MoCo

    def view():
        return {"input_ids": torch.randint(0, 20, (12, 5)), "mask": torch.ones(12, 5)}

    torch.manual_seed(0)
    columns = {"columns": {"id": "long"}}
    model = MoCo(Tokens(), feature_dim=16, queue_size=32, projection_dim=8, loss="supcon", queue_options=columns)
    views, samples = [view(), view()], [{"gt_label": i % 3, "sample_idx": 100 + i} for i in range(12)]
    plain = copy.deepcopy(model.method)
    model.train()
    batch = model.data_preprocessor({"inputs": views, "data_samples": samples}, training=True)
    loss = model(**batch, mode="loss")["loss"]
    labels, ids = torch.arange(12) % 3, torch.arange(12) + 100
    assert torch.equal(loss, plain(views, labels=labels, ids=ids))
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert torch.equal(model.method.queue.columns["label"][:12], labels)
    assert torch.equal(model.method.queue.columns["id"][:12], ids)
