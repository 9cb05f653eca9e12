"""Engines and adapters hand on the labels and image numbers of a batch to a method that asks for them, and to no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from moco_plugins import MoCo
from moco_plugins.data.arrays import ImageArray
from moco_plugins.data.loader import make_loader
from moco_plugins.hooks import manager as plugins
from moco_plugins.hooks.engine import TrainingJob


def images() -> ImageArray:
    torch.manual_seed(0)
    return ImageArray(torch.randint(0, 255, (32, 1, 4, 4), dtype=torch.uint8), torch.arange(32) % 3)


def both(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.float() / 255, batch.float() / 255 + 0.1 * torch.randn(batch.shape)


both.batched = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", ["lightning", "mmengine"])
def test_engines_hand_on_labels_and_image_numbers(engine: str, tmp_path: Path) -> None:
    moco = MoCo(
        nn.Sequential(nn.Flatten(), nn.Linear(16, 8)),
        8,
        queue_size=32,
        projection_dim=4,
        loss="supcon",
        queue_options={"columns": {"id": "long"}},
    )
    data = images()
    loader = make_loader(data, both, lambda batch: batch, 8, seed=0)
    loader.with_ids = "ids" in moco.asks_for
    run = plugins.adapter(engine).engine
    assert run is not None
    run(
        TrainingJob(
            method=moco,
            loader=loader,
            epochs=1,
            make_optimizer=lambda method: torch.optim.SGD(method.parameters(), 0.01),
            make_scheduler=None,
            folder=tmp_path,
            device="cpu",
        )
    )
    assert sorted(moco.queue.columns["id"].tolist()) == list(range(32))
    assert torch.equal(moco.queue.columns["label"], data.labels[moco.queue.columns["id"]])  # type: ignore[index]


def test_lightlys_filenames_become_numbers_that_are_the_same_everywhere() -> None:
    from moco_lightly.batches import ids

    views = (torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4))
    labels = torch.zeros(2).long()
    numbers = ids((views, labels, ["a/0.png", "b/1.png"]))
    assert numbers is not None
    assert numbers.tolist() == [int(numbers[0]), int(numbers[1])]
    assert len(set(numbers.tolist())) == 2
    assert (numbers >= 0).all()
    assert torch.equal(numbers, ids((views, labels, ["a/0.png", "b/1.png"])))  # type: ignore[arg-type]
    assert torch.equal(ids((views, labels, torch.tensor([5, 6]))), torch.tensor([5, 6]))  # type: ignore[arg-type]
    assert ids((views, labels)) is None


def test_mmengines_sample_numbers_are_kept() -> None:
    from moco_mmengine.batches import ids_of
    from moco_mmengine.transforms import element_of

    samples = [element_of({"gt_label": 1, "sample_idx": number}) for number in (7, 9)]
    assert ids_of(samples) == [7, 9]
    assert ids_of([element_of({"gt_label": 1})]) is None
