"""What the harness's tests share: a small data set, one without labels, a method that fails, from a plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import Tensor, nn

from moco_plugins import hookimpl
from moco_plugins.bench.plan.settings import Settings
from moco_plugins.data.datasets import DATASETS
from moco_plugins.hooks import manager as plugins


class Fails(nn.Module):
    """A method that goes wrong in the way and at the step that it is told."""

    total_steps: int | None = None

    def __init__(self, backbone: nn.Module, feature_dim: int, how: str = "error", at: int = 2) -> None:
        super().__init__()
        if how == "build":
            raise RuntimeError("no room for it")
        self.backbone, self.feature_dim, self.how, self.at, self.calls = backbone, feature_dim, how, at, 0

    def forward(self, views: Any) -> Tensor:
        loss: Tensor = self.backbone(views[0]).square().mean()
        if self.training:
            self.calls += 1
            if self.calls == self.at:
                if self.how == "error":
                    raise RuntimeError("the disk is full")
                if self.how == "interrupt":
                    raise KeyboardInterrupt
                loss = loss * float("nan")
        return loss

    def embed(self, images: Tensor) -> Tensor:
        return self.backbone(images)

    def metrics(self) -> dict[str, float]:
        return {}


class Extra:
    """A plugin with a small data set, one without labels, and a method that fails."""

    @staticmethod
    @hookimpl
    def moco_datasets() -> dict[str, Any]:
        def small(root: Any) -> Any:
            train, test = DATASETS["digits"](None)
            return train.subset(range(96)), test.subset(range(40))

        def bare(root: Any) -> Any:
            train, test = small(root)
            train.labels = test.labels = None
            return train, test

        return {"small": small, "bare": bare}

    @staticmethod
    @hookimpl
    def moco_methods() -> dict[str, Any]:
        return {"fails": Fails}

    @staticmethod
    @hookimpl
    def moco_report_sections(results: Any) -> list[tuple[str, str]]:
        return [("From a plugin", f"<p>{len(results['runs'])} runs seen</p>")]


@pytest.fixture(autouse=True, scope="module")
def _extra() -> Iterator[None]:
    plugins.register(Extra, "extra")
    yield
    plugins.unregister("extra")


@pytest.fixture
def small() -> Callable[..., Settings]:
    """Settings of a comparison of a few seconds; arguments change them."""

    def make(**changes: Any) -> Settings:
        return Settings(**{"methods": ("moco-v2",), "data": "small", "epochs": 2, "batch_size": 32, **changes})

    return make
