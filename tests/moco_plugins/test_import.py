"""The core alone: what it imports, and that it needs only torch, torchvision and pluggy."""

import ast
import subprocess
import sys
from pathlib import Path

import moco_plugins

CORE = Path(moco_plugins.__file__).parent
ADAPTERS = {"moco_huggingface", "moco_lightly", "moco_mmengine"}
HUGGING_FACE = {"transformers", "accelerate", "datasets", "huggingface_hub"}
FRAMEWORKS = {"lightly", "mmengine", "mmcv", "pytorch_lightning", "lightning", *HUGGING_FACE, *ADAPTERS}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)


def test_import_brings_in_no_framework_and_not_the_compiler():
    heavy = [*FRAMEWORKS, "torchvision", "cv2", "matplotlib", "sklearn", "torch._dynamo"]
    result = run(f"import sys, moco_plugins; print([m for m in {heavy!r} if m in sys.modules])")
    assert result.stdout.strip() == "[]", result.stderr


def test_every_public_name_is_there_also_those_imported_when_asked_for():
    result = run(
        "import sys, moco_plugins; late = 'moco_plugins.core.cross'; print(late in sys.modules)\n"
        "print(set(moco_plugins.__all__) <= set(dir(moco_plugins)), hasattr(moco_plugins, 'Missing'))\n"
        "from moco_plugins import *; print(CrossMoCo.__module__, TwoViews.__name__, late in sys.modules)"
    )
    assert result.stdout.splitlines() == ["False", "True False", "moco_plugins.core.cross TwoViews True"], result.stderr


def test_core_never_imports_a_framework_or_an_adapter():
    for path in CORE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & FRAMEWORKS, path


def test_adapters_are_light_until_used():
    code = "import sys, " + ", ".join(f"{adapter}, {adapter}.plugin" for adapter in sorted(ADAPTERS))
    result = run(code + f"; print([m for m in {sorted(FRAMEWORKS - ADAPTERS)} if m in sys.modules])")
    assert result.stdout.strip() == "[]", result.stderr


BLOCKED = """
import sys

class Hide:
    "A finder for which some packages are not installed."
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in {blocked!r} else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path = [Hide(finder) for finder in sys.meta_path]
"""


def test_core_trains_with_only_torch_torchvision_and_pluggy():
    blocked = sorted(
        {
            *FRAMEWORKS - ADAPTERS,
            "sklearn",
            "scipy",
            "mlxtend",
            "matplotlib",
            "timm",
            "tqdm",
            "pandas",
        }
    )
    code = BLOCKED.format(blocked=blocked) + (
        "import torch, torch.nn as nn\n"
        "from moco_plugins import MoCo, TwoViews, plugins\n"
        "m = MoCo(nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()), 12, queue_size=32)\n"
        "m2 = MoCo(nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 12)), 12, queue_size=32)\n"
        "views = [TwoViews(image_size=8)(torch.rand(3, 16, 16)) for _ in range(4)]\n"
        "views = [torch.stack(v) for v in zip(*views)]\n"
        "o = torch.optim.SGD(m2.parameters(), 0.1); m2(views).backward(); o.step()\n"
        "print(m2.steps, sorted(plugins.methods()))\n"
    )
    result = run(code)
    assert result.stdout.startswith("1 "), result.stderr
    assert "moco-v2" in result.stdout


def test_a_missing_extra_gives_the_pip_command():
    code = BLOCKED.format(blocked=["lightly", "pytorch_lightning", "lightning", "mmengine"])
    for use in (
        "from moco_plugins import plugins; import torch.nn as nn; plugins.method_factory('simclr')(nn.Identity(), 4)",
        "from moco_lightly import MoCoLoss; MoCoLoss(0.1, (8, 4))",
        "from moco_lightly import MoCoModule; MoCoModule",
    ):
        result = run(code + use)
        if "MoCoLoss" in use and result.returncode == 0:
            continue  # the loss needs nothing of lightly
        assert 'pip install "moco-plugins[lightly]"' in result.stderr, (use, result.stderr)
    result = run(code + "from moco_plugins import plugins; plugins.adapter('mmengine').activate()")
    assert 'pip install "moco-plugins[mmengine]"' in result.stderr
