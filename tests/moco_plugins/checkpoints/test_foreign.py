"""Checkpoints of other MoCo code, built here in the formats that those write."""

import pytest
import torch
import torchvision
from torch import nn

from moco_plugins import MoCo
from moco_plugins.checkpoints import load_foreign_checkpoint


def resnet():
    backbone = torchvision.models.resnet18()
    backbone.fc = nn.Identity()
    return backbone


def make(variant="v2", **options):
    options = {"queue_size": 0 if variant == "v3" else 32, "projection_dim": 16, "hidden_dim": 24, **options}
    return MoCo(resnet(), 512, variant, **options)


def authors(variant):
    """facebookresearch/moco: encoders with the head as ``fc``, DDP's ``module.``, the queue as (D, K)."""
    state = {}
    for encoder in ("encoder_q", "encoder_k"):
        net = torchvision.models.resnet18(num_classes=16)
        if variant == "v2":
            net.fc = nn.Sequential(nn.Linear(512, 24), nn.ReLU(), nn.Linear(24, 16))
        state.update({f"module.{encoder}.{name}": value for name, value in net.state_dict().items()})
    state["module.queue"] = nn.functional.normalize(torch.randn(16, 32), dim=0)
    state["module.queue_ptr"] = torch.tensor([8])
    return {"epoch": 3, "arch": "resnet18", "state_dict": state, "optimizer": {}}


def openmmlab():
    """mmselfsup and mmpretrain: backbone and neck, the key encoder as ``encoder_k.module.0`` and ``.1``."""
    state = {}
    for backbone, neck in (("backbone", "neck"), ("encoder_k.module.0", "encoder_k.module.1")):
        state.update({f"{backbone}.{name}": value for name, value in resnet().state_dict().items()})
        mlp = nn.Sequential(nn.Linear(512, 24), nn.ReLU(), nn.Linear(24, 16))
        state.update({f"{neck}.mlp.{name}": value for name, value in mlp.state_dict().items()})
    state["encoder_k.steps"] = torch.tensor(70)
    state["queue"] = nn.functional.normalize(torch.randn(16, 32), dim=0)
    state["queue_ptr"] = torch.zeros(1, dtype=torch.long)
    return {"meta": {}, "state_dict": state}


@pytest.mark.parametrize("variant", ["v1", "v2"])
def test_authors_v1_and_v2(variant, tmp_path):
    checkpoint = authors(variant)
    torch.save(checkpoint, tmp_path / "moco.pth.tar")
    moco = make(variant)
    assert load_foreign_checkpoint(moco, tmp_path / "moco.pth.tar") == []
    state = checkpoint["state_dict"]
    for theirs, ours in (("encoder_q", moco.query_encoder), ("encoder_k", moco.key_encoder)):
        assert torch.equal(ours.backbone.layer4[1].conv2.weight, state[f"module.{theirs}.layer4.1.conv2.weight"])
        head = "fc.2.weight" if variant == "v2" else "fc.weight"
        assert torch.equal(ours.projector[-1].weight, state[f"module.{theirs}.{head}"])
    assert torch.equal(moco.queue.keys, state["module.queue"].T)
    assert int(moco.queue.ptr) == 8
    before = moco.key_encoder.projector[0].weight.clone()
    moco([torch.randn(4, 3, 32, 32), torch.randn(4, 3, 32, 32)])
    assert torch.equal(moco.key_encoder.projector[0].weight, before), "the key encoder is not made anew"


def test_openmmlab():
    checkpoint = openmmlab()
    moco = make()
    assert load_foreign_checkpoint(moco, checkpoint) == []
    assert moco.steps == 70
    state = checkpoint["state_dict"]
    assert torch.equal(moco.query_encoder.projector[2].bias, state["neck.mlp.2.bias"])
    assert torch.equal(moco.key_encoder.projector[2].bias, state["encoder_k.module.1.mlp.2.bias"])
    assert torch.equal(moco.key_encoder.backbone.conv1.weight, state["encoder_k.module.0.conv1.weight"])
    assert torch.equal(moco.queue.keys, state["queue"].T)


def test_authors_v3():
    donor = make("v3", projection_layers=2)
    state = {}
    for theirs, encoder in (("base_encoder", donor.query_encoder), ("momentum_encoder", donor.key_encoder)):
        state.update({f"module.{theirs}.{name}": value for name, value in encoder.backbone.state_dict().items()})
        state.update({f"module.{theirs}.fc.{name}": value for name, value in encoder.projector.state_dict().items()})
    state.update({f"module.predictor.{name}": value for name, value in donor.predictor.state_dict().items()})
    moco = make("v3", projection_layers=2)
    assert load_foreign_checkpoint(moco, {"state_dict": state}) == []
    for name, value in donor.state_dict().items():
        if name != "steps":
            assert torch.equal(moco.state_dict()[name], value), name


def test_what_does_not_fit_is_said():
    with pytest.raises(ValueError, match=r"queue.keys is \(32, 16\) there and \(64, 16\) here.*queue_size"):
        load_foreign_checkpoint(make(queue_size=64), authors("v2"))
    with pytest.raises(ValueError, match=r"projector"):
        load_foreign_checkpoint(make("v2"), authors("v1"))
    with pytest.raises(ValueError, match="are not there"):
        load_foreign_checkpoint(make(), {"state_dict": {"conv.weight": torch.zeros(1)}})
    with pytest.raises(ValueError, match="no tensors in it"):
        load_foreign_checkpoint(make(), {"epoch": 3})


def test_nothing_is_loaded_when_something_does_not_fit():
    moco = make(queue_size=64)
    before = {name: value.clone() for name, value in moco.state_dict().items()}
    with pytest.raises(ValueError):
        load_foreign_checkpoint(moco, authors("v2"))
    assert all(torch.equal(value, before[name]) for name, value in moco.state_dict().items())
