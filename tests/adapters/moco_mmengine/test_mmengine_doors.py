"""Every way into MMEngine's registries, each in a fresh process."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("mmengine")

MODEL = "dict(type='moco_plugins.MoCo', backbone=dict(type='moco_plugins.Backbone', name='convnet'), queue_size=64)"
CONFIG = f"custom_imports = dict(imports=['moco_plugins'], allow_failed_imports=False)\nmodel = {MODEL}\n"
LAZY = """
from mmengine.config import read_base
with read_base():
    from .base import *
from moco_mmengine import Backbone, DataPreprocessor, KNNMetric, MoCo, SimCLR, mnist5k
custom_imports = dict(imports=['nothing_of_that_name'], allow_failed_imports=False)  # lazy configs ignore it
model = dict(type=MoCo, backbone=dict(type=Backbone, name='convnet'), queue_size=size,
             data_preprocessor=dict(type=DataPreprocessor))
data, metric = dict(type=mnist5k, limit=8), dict(type=KNNMetric)
"""
BUILD = f"from mmengine.registry import MODELS; m = MODELS.build({MODEL})"
CHECK = """
from mmengine.model import BaseModel
assert isinstance(m, BaseModel), type(m)
import torch
x = [torch.rand(4, 3, 16, 16), torch.rand(4, 3, 16, 16)]
assert m(x, mode='loss')['loss'].ndim == 0
print('built')
"""
DOORS = {
    "custom_imports": "from mmengine.config import Config; from mmengine.registry import MODELS; "
    "m = MODELS.build(Config.fromfile('door.py').model)",
    "the scoped type alone": BUILD,
    "moco_plugins first": "import moco_plugins; moco_plugins.MoCo; moco_plugins.KeyQueue(4, 4); " + BUILD,
    "imported twice": f"import importlib, mmengine, moco_plugins; importlib.reload(moco_plugins); {BUILD}; {BUILD}",
    "under default_scope mmengine": "from mmengine.registry import init_default_scope; init_default_scope('mmengine'); "
    + BUILD,
    "under default_scope moco_plugins": "from mmengine.registry import init_default_scope, HOOKS; import moco_plugins, "
    f"mmengine.hooks; init_default_scope('moco_plugins'); {BUILD.replace('moco_plugins.', '')}; "
    "HOOKS.build(dict(type='EMAHook'))",
    "under a default_scope with a MoCo of its own": "from mmengine.registry import MODELS, Registry, init_default_scope; "
    "theirs = Registry('model', parent=MODELS, scope='theirs'); "
    "theirs.register_module(name='MoCo', module=dict); init_default_scope('theirs'); "
    "assert MODELS.get('theirs.MoCo') is dict; " + BUILD,
    "lazy config": "from mmengine.config import Config; from mmengine.registry import DATASETS, METRICS, MODELS; "
    "c = Config.fromfile('lazy.py', lazy_import=True); m = MODELS.build(c.model); METRICS.build(c.metric); "
    "assert len(DATASETS.build(c.data)) == 8; c.pop('custom_imports'); c.dump('dumped.py'); d = Config.fromfile('dumped.py'); "
    "m = MODELS.build(d.model); assert len(DATASETS.build(d.data)) == 8",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("doors")
    (path / "door.py").write_text(CONFIG)
    (path / "base.py").write_text("size = 64\n")
    (path / "lazy.py").write_text(LAZY)
    return path


def python(code, cwd, *options):
    command = [sys.executable, "-W", "error::UserWarning:moco_plugins", *options, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("door", DOORS)
def test_the_model_is_built(door, folder):
    run = python(DOORS[door] + CHECK, folder)
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith("built\n")


def test_importing_the_adapter_does_not_import_mmengine(folder):
    code = "import sys, moco_mmengine, moco_mmengine.plugin, moco_plugins; print('mmengine' in sys.modules)"
    assert python(code, folder).stdout == "False\n"


def test_without_mmengine_the_pip_command_is_given(folder):
    code = """
import sys
sys.modules['mmengine'] = None
import moco_mmengine
from moco_plugins import plugins
adapter = plugins.adapter('mmengine')
calls = adapter.activate, lambda: adapter.engine(None), lambda: adapter.train_config(['c']), lambda: moco_mmengine.MoCo
for call in calls:
    try:
        call()
    except ImportError as error:
        print(str(error).split(': ', 1)[-1] if 'moco_mmengine.' in str(error) else error)
"""
    run = python(code, folder)
    assert run.stdout.count('MMEngine is not installed: pip install "moco-plugins[mmengine]"') == 4, (
        run.stdout + run.stderr
    )
