from __future__ import annotations

from typing import Any

import pytest

from moco_plugins.bench.plan.complete import complete
from moco_plugins.bench.plan.data import load_data
from moco_plugins.bench.plan.runs import plan
from moco_plugins.bench.plan.settings import Settings
from moco_plugins.bench.run.recipe import build_loader
from moco_plugins.bench.run.set_up import build_method
from moco_plugins.hooks import manager as plugins


def options(**given: Any) -> dict[str, Any]:
    """Method -> its options, for settings of the default data."""
    data = load_data("mnist5k", None, None, 20)
    return {run.label: dict(run.options) for run in plan(complete(Settings(**given), data))}


def test_moco_v3_has_no_queue_unless_it_is_asked_for() -> None:
    found = options(methods=("moco-v2", "moco-v3"))
    assert found["moco-v2"]["queue_size"] == 1024
    assert found["moco-v2"]["drift_probe"] > 0
    assert found["moco-v3"]["queue_size"] == 0
    assert "drift_probe" not in found["moco-v3"]
    assert options(methods=("moco-v3",), method_options={"moco-v3": {"queue_size": 32}})["moco-v3"]["queue_size"] == 32


def test_what_is_asked_for_goes_before_the_preset() -> None:
    found = options(methods=("simclr", "dino"), options={"projection_dim": 7})
    assert [found[method]["projection_dim"] for method in ("simclr", "dino")] == [7, 7]
    found = options(methods=("simclr", "dino"), method_options={"dino": {"projection_dim": 7}})
    assert [found[method]["projection_dim"] for method in ("simclr", "dino")] == [64, 7]
    found = options(methods=("moco-v2",), options={"momentum": 0.5}, sweep={"momentum": (0.6, 0.7)})
    assert [o["momentum"] for o in found.values()] == [0.6, 0.7]


@pytest.mark.parametrize(
    "name", [n for n, (plugin, _) in plugins.methods().items() if plugin in ("builtin", "lightly")]
)
def test_every_method_is_built_from_the_preset_and_gives_a_loss(name: str) -> None:
    data = load_data("mnist5k", None, None, 20)
    settings = complete(Settings(methods=(name,), batch_size=8), data)
    (run,) = plan(settings)
    loader = build_loader(settings, data, name, 0)
    method, _ = build_method(run, settings, data, loader)
    views, _ = next(iter(loader))
    loss = method(views)
    assert loss.isfinite()
    if name == "moco-v3":
        assert method.queue is None
