"""Jobs that every engine carries out, and the plain loop in torch that each must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from moco_plugins.core.views import AffineViews
from moco_plugins.data.datasets import digits
from moco_plugins.data.loader import StepLoader, make_loader
from moco_plugins.hooks import manager as plugins
from moco_plugins.hooks.engine import Adapter, TrainingJob, TrainingOutcome
from moco_plugins.hooks.method import asked_of

#: What accumulates gradients over two batches, in the words of each engine.
ACCUMULATE: dict[str, dict[str, Any]] = {
    "accelerate": {"gradient_accumulation_steps": 2},
    "lightning": {"accumulate_grad_batches": 2},
    "mmengine": {"accumulative_counts": 2},
}
Steps = list[tuple[int, float]]


def adapters() -> dict[str, Adapter]:
    """All that train."""
    return {name: adapter for name, (_, adapter) in plugins.adapters().items() if adapter.engine is not None}


def build(name: str = "moco-v2", dropout: float = 0.1, **changes: Any) -> nn.Module:
    """A method around a small backbone with BatchNorm and dropout, the same each time."""
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(128, 16)
    )
    options = {"projection_dim": 8, "hidden_dim": 16, **changes}
    if name == "moco-v2":
        options = {"queue_size": 100, "momentum": 0.9, **options}
    return plugins.method_factory(name)(backbone, 16, **options)


def loader_of(count: int = 160, batch_size: int = 40, views: Callable[[Any], Any] | None = None) -> StepLoader:
    """Batches of the first digits."""
    return make_loader(digits(None)[0].subset(range(count)), views or AffineViews(), lambda x: x, batch_size, seed=0)


def make_optimizer(method: nn.Module) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW([p for p in method.parameters() if p.requires_grad], 1e-2)


def make_scheduler(optimizer: torch.optim.Optimizer, total: int) -> torch.optim.lr_scheduler.LRScheduler:
    """One cycle, which a step too many would be an error of."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=total)


def job_of(folder: Path, method: nn.Module, **changes: Any) -> TrainingJob:
    """A job of two epochs on the CPU."""
    return TrainingJob(
        **{
            "method": method,
            "loader": changes["loader"] if "loader" in changes else loader_of(),
            "epochs": 2,
            "make_optimizer": make_optimizer,
            "make_scheduler": make_scheduler,
            "folder": folder,
            "device": "cpu",
            **changes,
        }
    )


def train(engine: str, folder: Path, method: nn.Module, **changes: Any) -> tuple[Steps, TrainingOutcome]:
    """Carry out a job; return (step, loss) of each step, and the outcome."""
    steps: Steps = []
    run = plugins.adapter(engine).engine
    assert run is not None
    return steps, run(job_of(folder, method, **{"on_step": lambda step, loss: steps.append((step, loss)), **changes}))


def plain_loop(method: Any, loader: StepLoader | None = None, epochs: int = 2, accumulate: int = 1) -> Steps:
    """Train as a book would, without any framework."""
    loader = loader or loader_of()
    method.total_steps = epochs * len(loader) // accumulate
    optimizer = make_optimizer(method)
    scheduler = make_scheduler(optimizer, method.total_steps)
    steps: Steps = []
    losses: list[float] = []
    for epoch in range(epochs):
        loader.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]
        for batch in loader:
            loss: Tensor = method(batch[0], **asked_of(method, *batch[1:3]))
            (loss / accumulate).backward()
            losses.append(loss.item())
            if len(losses) == accumulate:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                steps.append((len(steps) + 1, sum(losses) / accumulate))
                losses = []
    return steps


def differing(first: nn.Module, second: nn.Module) -> list[str]:
    """The names of what is not bit for bit the same in two modules."""
    left, right = first.state_dict(), second.state_dict()
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


class FixedViews:
    """Views that are a function of the image, so that it does not matter which process makes them."""

    batched = True

    def __call__(self, images: Tensor) -> Sequence[Tensor]:
        return images, images.flip(-1)


class Noisy(TensorDataset):
    """Two noisy copies of an image, from the global random numbers: a loader with no seeding of its own."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return [image + 0.1 * torch.randn_like(image) for _ in range(2)], label


def plain_loader() -> DataLoader[Any]:
    """A shuffling loader of pairs of noisy copies."""
    digits = loader_of().dataset.images  # type: ignore[attr-defined]
    return DataLoader(Noisy(digits.images.float() / 255, digits.labels), 40, shuffle=True)
