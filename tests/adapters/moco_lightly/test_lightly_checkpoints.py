"""Checkpoints of lightly's own MoCo example are read: encoder, key encoder, and a word about the queue."""

from __future__ import annotations

import copy

import pytest
import pytorch_lightning as pl
import torch
import torchvision
from lightly.loss import NTXentLoss
from lightly.models.modules import MoCoProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from moco_lightly import lightning_module_class, load_lightly_checkpoint
from torch import nn

from moco_plugins import MoCo
from moco_plugins.checkpoints import load


class Example(pl.LightningModule):
    """lightly's examples/pytorch_lightning/moco.py, with a smaller bank."""

    def __init__(self):
        super().__init__()
        resnet = torchvision.models.resnet18()
        self.backbone = nn.Sequential(*list(resnet.children())[:-1])
        self.projection_head = MoCoProjectionHead(512, 512, 128)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NTXentLoss(memory_bank_size=(64, 128))

    def forward(self, x):
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def forward_momentum(self, x):
        return self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1)).detach()

    def training_step(self, batch, batch_idx):
        update_momentum(self.backbone, self.backbone_momentum, m=0.5)
        update_momentum(self.projection_head, self.projection_head_momentum, m=0.5)
        x_query, x_key = batch[0]
        return self.criterion(self(x_query), self.forward_momentum(x_key))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    torch.manual_seed(0)
    module = Example()
    data = [([torch.rand(3, 32, 32), torch.rand(3, 32, 32)], 0) for _ in range(16)]
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, 8))
    path = tmp_path_factory.mktemp("example") / "moco.ckpt"
    trainer.save_checkpoint(path)
    return module.eval(), path


def resnet(kind: str) -> nn.Module:
    net = torchvision.models.resnet18()
    if kind == "resnet":
        net.fc = nn.Identity()
        return net
    return nn.Sequential(*list(net.children())[:-1], nn.Flatten())


@pytest.mark.parametrize("kind", ["resnet", "sequential"])
def test_both_encoders_are_loaded(kind, trained):
    module, path = trained
    moco = MoCo(resnet(kind), 512, queue_size=64, projection_dim=128)
    queue = moco.queue.keys.clone()
    with pytest.warns(UserWarning, match="starts fresh"):
        load_lightly_checkpoint(moco, path)
    moco.eval()
    x = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(moco.query_encoder(x), module(x))
        torch.testing.assert_close(moco.key_encoder(x), module.forward_momentum(x))
        assert not torch.allclose(moco.query_encoder(x), moco.key_encoder(x))
    assert torch.equal(queue, moco.queue.keys)
    assert moco.steps == 2
    key = [p.clone() for p in moco.key_encoder.parameters()]
    moco.train()([x, x.flip(0)])  # the first forward pass keeps the key encoder as it was loaded
    assert all(torch.equal(a, b) for a, b in zip(key, moco.key_encoder.parameters(), strict=True))


def test_into_a_module(trained):
    module = lightning_module_class("pytorch_lightning")(resnet("resnet"), 512, queue_size=64)
    with pytest.warns(UserWarning, match="starts fresh"):
        load_lightly_checkpoint(module, torch.load(trained[1], weights_only=True))
    assert module.moco.steps == 2


def test_what_does_not_fit_is_named(trained):
    _, path = trained
    with pytest.raises(ValueError, match=r"projection_head\.layers\.0\.weight is \(512, 512\)"):
        load_lightly_checkpoint(MoCo(resnet("resnet"), 512, queue_size=64, hidden_dim=64), path)
    with pytest.raises(ValueError, match="tensors"):
        load_lightly_checkpoint(MoCo(nn.Linear(512, 512), 512, queue_size=64), path)
    with pytest.raises(ValueError, match="not those of lightly's MoCo"):
        load_lightly_checkpoint(MoCo(nn.Linear(4, 4), 4, queue_size=8), {"encoder_q.conv1.weight": torch.zeros(1)})
    with pytest.raises(TypeError, match="Linear"):
        load_lightly_checkpoint(nn.Linear(2, 2), path)


def test_the_reader_of_formats_finds_it_by_names(trained):
    module, path = trained
    weights = load(path)
    assert weights.format == "lightly"
    assert weights.architecture.name == "resnet18"
    assert weights.missing == ("queue",)
    assert any("hold no queue" in note for note in weights.notes)
    moco = weights.build_moco(queue_size=64).eval()
    x = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(moco.query_encoder(x), module(x), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(moco.key_encoder(x), module.forward_momentum(x), atol=1e-6, rtol=1e-6)
    assert moco.steps == 2
