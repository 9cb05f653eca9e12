"""Every MMEngine recipe is built as it is written, and makes two steps on a few small images."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("mmengine")
pytest.importorskip("sklearn")

from mmengine.config import Config
from moco_mmengine.train import main

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:the features have collapsed", "ignore:shuffle_bn")
RECIPES = Path(__file__).parents[2] / "recipes" / "mmengine"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py"))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    noise = np.random.default_rng(0)
    for part in ("train", "val"):
        for number in range(10):
            path = folder / part / str(number % 2) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(0, 255, (40, 40, 3), np.uint8)).save(path)
    return folder


def test_all_recipes_are_here():
    assert {name.split("_")[0] for name in NAMES} == {"mocov1", "mocov2", "mocov2plus", "mocov3"}


def test_each_is_short():
    for path in RECIPES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 65, path.name


def small(cfg, images):
    """The recipe with a few small images, a small queue and no GPU; everything else as it is written."""
    size = 28 if "mnist5k" in cfg.train_dataloader.dataset.type else 32
    for name in ("train_dataloader", "val_dataloader"):
        if name in cfg:
            loader = cfg[name]
            loader.update(batch_size=4, num_workers=0, persistent_workers=False)
            loader.dataset.limit = 8
            if not loader.dataset.type.endswith("mnist5k"):
                loader.dataset.update(type="moco_plugins.ImageFolder", root=str(images))
            for transform in loader.dataset.get("pipeline", []):
                transform.image_size = size
    cfg.model.backbone.image_size = size
    if "views" in cfg.model.get("data_preprocessor", {}):
        cfg.model.data_preprocessor.views.image_size = size
    if cfg.model.variant != "v3":
        cfg.model.queue_size = 16
    if cfg.optim_wrapper.get("type") == "AmpOptimWrapper":
        cfg.optim_wrapper.type = "moco_plugins.AutocastOptimWrapper"
        cfg.optim_wrapper.pop("loss_scale")
    cfg.train_cfg.update(max_epochs=1, val_interval=1)
    cfg.default_hooks.checkpoint.interval = 1
    cfg.log_level = "WARNING"
    return cfg


@pytest.mark.parametrize("name", NAMES)
def test_two_steps(name, images, tmp_path):
    path = tmp_path / f"{name}.py"
    small(Config.fromfile(RECIPES / f"{name}.py"), images).dump(path)
    assert main([str(path), "--work-dir", str(tmp_path / "work")]) == 0
    state = torch.load(tmp_path / "work" / "epoch_1.pth", weights_only=False)["state_dict"]
    assert int(state["method.steps"]) == 2
    assert all(torch.isfinite(value).all() for value in state.values() if value.is_floating_point())


def test_the_readme_lists_them_and_its_python_is_config():
    text = (RECIPES / "README.md").read_text()
    assert sorted(set(re.findall(r"(mocov\w+[\w-]*)\.py`", text))) == sorted(NAMES)
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if "mmpretrain::" not in snippet:
            assert Config.fromstring(snippet, ".py").model.type == "moco_plugins.MoCo"
