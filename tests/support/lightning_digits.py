"""A small MoCoModule on real digits, and a quiet Trainer."""

from __future__ import annotations

import copy
import warnings

import pytorch_lightning as pl
import torch
from moco_lightly import lightning_module_class
from torch import nn
from torch.utils.data import DataLoader, Dataset

from moco_plugins.hooks import manager as plugins

MoCoModule = lightning_module_class("pytorch_lightning")


class Digits(Dataset):
    """Digits with two fixed views each; ``form`` is what an item looks like."""

    def __init__(self, count: int = 96, form: str = "plain") -> None:
        data, _ = plugins.dataset_factory("digits")(None)
        self.images, self.labels, self.form = data.images[:count].float() / 255, data.labels[:count], form
        noise = torch.randn(self.images.shape, generator=torch.Generator().manual_seed(0))
        self.others = self.images + 0.2 * noise

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i):
        views, label = [self.images[i], self.others[i]], int(self.labels[i])
        return {
            "plain": (views, label),
            "lightly": (views, label, f"{i}.png"),
            "views": views,
            "single": (self.images[i], label),
        }[self.form]


def backbone(batch_norm: bool = False) -> nn.Module:
    norm = nn.BatchNorm1d(32) if batch_norm else nn.Identity()
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), norm, nn.ReLU(), nn.Linear(32, 16))


def build(cls=None, batch_norm: bool = False, **options):
    torch.manual_seed(0)
    defaults = {"queue_size": 70, "projection_dim": 8, "momentum": 0.9, "lr": 0.5}
    return (cls or MoCoModule)(backbone(batch_norm), 16, **{**defaults, **options})


def trainer(framework=pl, **options):
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 2,
        "log_every_n_steps": 1,
    }
    return framework.Trainer(**{**quiet, **options})


def loader(count: int = 96, batch: int = 24, form: str = "plain"):
    return DataLoader(Digits(count, form), batch)


def fit(module, data=None, val=None, ckpt_path=None, **options):
    t = trainer(**options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(does not have many workers|LeafSpec|eval mode at the start).*")
        t.fit(module, loader() if data is None else data, val, ckpt_path=ckpt_path)
    return t


def state(module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(module.moco.state_dict())


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
