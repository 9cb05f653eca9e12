"""Every snippet of the README does what it says, in order, as a newcomer would run them."""

import re
import subprocess
import sys
from pathlib import Path

import layouts
import pytest
import torch

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"(?:<!-- file: (\S+) -->\n)?```(\w+)\n(.*?)```", README, re.DOTALL)
SCRIPTS = [code for name, language, code in BLOCKS if language == "python" and not name]
FILES = {name: code for name, language, code in BLOCKS if name}
COMMANDS = [line for _, language, code in BLOCKS if language == "bash" for line in code.splitlines()]


def run(command: list[str], folder: Path) -> str:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readme")
    for name, code in FILES.items():
        (folder / name).write_text(code)
    torch.save(layouts.moco("v2").content, folder / "checkpoint_0199.pth.tar")  # as the authors' code writes it
    return folder


@pytest.mark.parametrize("code", SCRIPTS, ids=lambda code: code.strip().splitlines()[-1][:40])
def test_python(code, folder):
    run([sys.executable, "-c", code], folder)


def test_the_promised_lengths():
    torch_loop = next(code for code in SCRIPTS if "resnet18-cifar" in code and "for _" in code)
    statements = [line for line in torch_loop.splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(statements) <= 11  # ten lines, and the print


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("moco-plugins train")])
def test_train_commands(command, folder):
    out = run([sys.executable, "-m", "moco_plugins", *command.split()[1:]], folder)
    assert "loss" in out


@pytest.fixture(scope="module")
def photos(folder):
    """Photos without labels, and a few with, under the names that the README gives them."""
    import torch
    from torchvision.transforms.functional import to_pil_image

    (folder / "photos").mkdir()
    for i in range(48):
        kind = folder / "labelled" / ("dark", "light")[i % 2]
        kind.mkdir(parents=True, exist_ok=True)
        image = to_pil_image((torch.rand(3, 16, 16) + i % 2) / 2)
        image.save(kind / f"{i}.png")
        image.save(folder / "photos" / f"{i}.png")


@pytest.mark.parametrize("command", [c for c in COMMANDS if re.match("moco-plugins (pretrain|evaluate)", c)])
def test_pretrain_and_evaluate_commands(command, folder, photos):
    arguments = command.partition("#")[0].split()[1:]
    quick = ["--backbone", "convnet", "--epochs", "1"] if arguments[0] == "pretrain" else []
    out = run([sys.executable, "-m", "moco_plugins", *arguments, *quick], folder)
    assert ("weights.safetensors" if quick else "pretrained") in out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("moco-plugins bench")])
def test_bench_commands(command, folder):
    arguments = re.sub(r"--epochs \d+", "--epochs 1", command).split()[1:]
    out = run([sys.executable, "-m", "moco_plugins", *arguments], folder)
    assert "moco-v2" in out


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("moco-plugins report")])
def test_report_commands(command, folder):  # of what the commands before it have left
    run([sys.executable, "-m", "moco_plugins", *command.split()[1:]], folder)
    page = (folder / "both" / "report.html").read_text()
    assert "moco-v2" in page
    assert "simclr" in page


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.startswith(("moco-plugins inspect", "moco-plugins convert"))]
)
def test_commands_on_weights(command, folder):
    out = run([sys.executable, "-m", "moco_plugins", *command.split()[1:]], folder)
    assert "resnet18 (3 channels, 224 px)" in out


def test_the_two_commands_and_their_table_are_there():
    assert 'pip install -e ".[all]" && moco-plugins bench' in COMMANDS
    assert 'pip install -e ".[dev]" && pytest' in COMMANDS
    table = README.split("<!-- table -->")[1].split("<!-- /table -->")[0]
    for name in ("moco-v2", "simclr", "byol", "raw-pixels", "untrained"):
        assert name in table


def test_the_plugin_snippet_with_its_entry_point(folder):
    toml = next(code for _, language, code in BLOCKS if language == "toml")
    name, module = re.search(r"^(\S+) = \"(\S+)\"", toml, re.MULTILINE).groups()
    info = folder / "my_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[moco_plugins]\n{name} = {module}\n")
    code = (
        "import torch\nfrom moco_plugins import MoCo\n"
        "moco = MoCo(torch.nn.Flatten(), 48, queue_size=16, loss='softer', temperature=0.1)\n"
        "print(moco([torch.randn(4, 3, 4, 4), torch.randn(4, 3, 4, 4)]).item())"
    )
    assert float(run([sys.executable, "-c", code], folder)) > 0


def test_every_file_it_names_exists():
    root = Path(__file__).parents[1]
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (root / target).exists(), target
