"""lightly's methods as people use them: both engines train them alike, and each beats its own untrained backbone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moco_plugins import Cosine
from moco_plugins.backbones import ConvNet
from moco_plugins.core.views import AffineViews
from moco_plugins.data.loader import make_loader
from moco_plugins.evaluation import extract_features, knn_accuracy
from moco_plugins.hooks import manager as plugins
from moco_plugins.hooks.engine import TrainingJob

OPTIONS = {
    "simclr": {},
    "byol": {"momentum": Cosine(0.9, 1.0)},
    "simsiam": {},
    "barlow-twins": {},
    "vicreg": {},
    "nnclr": {"prediction_hidden_dim": 128, "queue_size": 512},
    "swav": {"prototypes": 64, "queue_size": 256},
    "dino": {"projection_dim": 128, "bottleneck_dim": 32, "batch_norm": True, "momentum": Cosine(0.9, 1.0)},
}


MOCO = {"moco-v2": {"queue_size": 150}, "moco-v3": {"hidden_dim": 32}}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return plugins.method_factory(name)(
        ConvNet(1, 16), 256, **{"projection_dim": 64, "hidden_dim": 128, **(OPTIONS | MOCO)[name]}
    )


def train(engine: str, method: torch.nn.Module, images, epochs: int, folder: Path):
    run = plugins.adapter(engine).engine
    assert run is not None
    job = TrainingJob(
        method=method,
        loader=make_loader(images, AffineViews(), lambda x: x, 64, 0),
        epochs=epochs,
        make_optimizer=lambda m: torch.optim.AdamW(m.parameters(), 3e-3, weight_decay=0.05),
        make_scheduler=lambda o, total: torch.optim.lr_scheduler.OneCycleLR(o, 3e-3, total_steps=total),
        folder=folder,
        device="cpu",
    )
    return run(job)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(OPTIONS))
def test_beats_its_untrained_backbone(name, tmp_path):
    images, test = plugins.dataset_factory("mnist5k")(None)
    method = build(name)

    def knn() -> float:
        return knn_accuracy(*extract_features(method, images), *extract_features(method, test))

    untrained = knn()
    train("lightning", method, images, 8 if name == "simsiam" else 4, tmp_path)  # SimSiam is slow to start
    assert knn() > untrained + 0.005


@pytest.mark.parametrize("name", [*OPTIONS, *MOCO])
def test_both_engines_train_alike(name, tmp_path):
    pytest.importorskip("mmengine")
    digits, _ = plugins.dataset_factory("digits")(None)
    images = digits.subset(torch.arange(192))
    states = []
    for engine in ("lightning", "mmengine"):
        method = build(name)
        assert train(engine, method, images, 2, tmp_path / engine).steps == 6
        states.append(method.state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
