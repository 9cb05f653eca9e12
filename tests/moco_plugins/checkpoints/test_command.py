"""``moco-plugins convert`` and ``inspect``: what they do with files, and what they say."""

import importlib
import subprocess
import sys

import layouts
import pytest
import timm
import torch
import torchvision
from torch import nn

from moco_plugins import cli, hookimpl
from moco_plugins.checkpoints import Format, Weights, convert
from moco_plugins.hooks import manager as plugins


@pytest.fixture
def run(capsys):
    def run(*argv):
        code = cli.main([str(a) for a in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_the_command_converts_says_what_it_left_out_and_replaces_only_by_force(run, tmp_path):
    torch.save(torchvision.models.resnet18().state_dict(), tmp_path / "in.pth")
    code, out, err = run("convert", tmp_path / "in.pth", tmp_path / "out.safetensors", "--to", "safetensors")
    assert code == 0
    assert "torchvision, resnet18 (3 channels, 224 px)" in out
    assert "left out: fc.weight, fc.bias" in err
    before = (tmp_path / "out.safetensors").stat().st_mtime_ns
    code, _, err = run("convert", tmp_path / "in.pth", tmp_path / "out.safetensors", "--to", "moco")
    assert code == 2
    assert "--force" in err
    assert (tmp_path / "out.safetensors").stat().st_mtime_ns == before
    assert run("convert", tmp_path / "in.pth", tmp_path / "out.safetensors", "--to", "moco", "--force")[0] == 0
    assert run("inspect", tmp_path / "out.safetensors")[1].startswith("format        moco\n")


def test_folders_are_replaced_whole(run, files, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "old.txt").write_text("old")
    (tmp_path / "hf.partial").mkdir()  # what a killed run has left
    assert run("convert", files["resnet"], tmp_path / "hf", "--to", "huggingface")[0] == 2
    assert run("convert", files["resnet"], tmp_path / "hf", "--to", "huggingface", "--force")[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]


def test_what_cannot_be_written_is_said_and_leaves_nothing(run, files, tmp_path):
    network = torchvision.models.convnext_tiny()
    torch.save(network.state_dict(), tmp_path / "convnext.pth")
    cifar = layouts.bare_resnet()
    cifar.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    torch.save(cifar.state_dict(), tmp_path / "cifar.pth")
    for source, to, message in (
        (tmp_path / "convnext.pth", "timm", "timm has no model"),
        (tmp_path / "convnext.pth", "detectron2", "names of a resnet are known"),
        (tmp_path / "convnext.pth", "huggingface", "of ResNets and ViTs"),
        (tmp_path / "cifar.pth", "huggingface", "a stem of 7 x 7"),
        (files["vit"], "detectron2", "names of a resnet are known"),
        (files["vit"], "solo-learn", "is read and not written"),
        (files["vit"], "tensorflow", "format='tensorflow' is not known|not a format that is written"),
        (tmp_path / "absent.pth", "timm", "there is no such file"),
    ):
        code, _, err = run("convert", source, tmp_path / "out", "--to", to)
        assert code == 2, to
        assert any(part in err for part in message.split("|")), err
        assert not (tmp_path / "out").exists()
        assert not (tmp_path / "out.partial").exists()
    code, _, err = run("convert", files["vit"], tmp_path / "out", "--to", "safetensors", "--part", "encoder")
    assert code == 2
    assert "no projection head" in err


def test_arch_names_what_is_not_recognised(run, tmp_path):
    model = timm.create_model("resnet26", num_classes=0)
    torch.save(model.state_dict(), tmp_path / "in.pth")
    assert "not known (--arch names it)" in run("inspect", tmp_path / "in.pth")[1]
    code, _, err = run(
        "convert", tmp_path / "in.pth", tmp_path / "a.safetensors", "--to", "safetensors", "--arch", "timm/resnet26"
    )
    assert (code, err) == (0, "")
    assert "timm/resnet26" in run("inspect", tmp_path / "a.safetensors")[1]
    code, _, err = run("convert", tmp_path / "in.pth", tmp_path / "b", "--to", "timm", "--arch", "resnet34")
    assert code == 2


def test_inspect_prints_format_architecture_parts_sizes_and_steps(run, tmp_path):
    torch.save(layouts.mmselfsup_1x().content, tmp_path / "in.pth")
    out = run("inspect", tmp_path / "in.pth")[1]
    for line in (
        "format        mmengine",
        "architecture  resnet18 (3 channels, 224 px)",
        "projector     4 tensors",
        "(2 layers, 24 wide, out 16)",
        "key backbone  120 tensors",
        "queue         32 keys of 16",
        "steps         70",
    ):
        assert line in out


def test_a_plugin_brings_a_format(run, tmp_path, files):
    class Plugin:
        @hookimpl
        def moco_checkpoint_formats(self):
            def read(content):
                return Weights("", content.take("theirs/")) if content.has("theirs/") else None

            def write(weights, path, part):
                torch.save({f"theirs/{name}": value for name, value in weights.backbone.items()}, path)

            return {"theirs": Format("a stranger's", read, write=write)}

    plugins.register(Plugin(), "stranger")
    try:
        assert run("convert", files["resnet"], tmp_path / "out.pth", "--to", "theirs")[0] == 0
        assert "format        theirs" in run("inspect", tmp_path / "out.pth")[1]
    finally:
        plugins.unregister("stranger")


def test_reading_needs_no_framework(files):
    code = (
        "import sys; from moco_plugins.checkpoints import load; load(sys.argv[1]);"
        "print([m for m in ('mmengine', 'lightly', 'transformers', 'pytorch_lightning', 'timm', 'safetensors', 'onnx') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(files["resnet"])], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_missing_packages_are_named_with_the_command(files, tmp_path, monkeypatch):
    for to, package, extra in (("safetensors", "safetensors", "safetensors"), ("onnx", "onnxscript", "onnx")):
        if importlib.util.find_spec("onnx") is None and to == "onnx":
            continue
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ModuleNotFoundError, match=rf'pip install "moco-plugins\[{extra}\]"'):
            convert(files["resnet"], tmp_path / "out", to)
