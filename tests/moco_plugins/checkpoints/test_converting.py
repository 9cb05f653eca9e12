"""``convert``: what it writes is taken by those it is for, with the same features; and what it does with files."""

import dataclasses
import pickle

import layouts
import numpy as np
import pytest
import timm
import torch
import torchvision
from torch import nn

from moco_plugins import MoCo
from moco_plugins.backbones import build_backbone
from moco_plugins.checkpoints import convert, load
from moco_plugins.evaluation import knn_accuracy

SIZES = {"resnet": 64, "vit": 32}


def images(kind, count=3):
    return torch.randn(count, 3, SIZES[kind], SIZES[kind], generator=torch.Generator().manual_seed(2))


def same(ours, kind, networks, tolerance=1e-6):
    with torch.no_grad():
        expected = networks[kind](images(kind))
        torch.testing.assert_close(ours(images(kind)), expected, atol=tolerance, rtol=tolerance)


# Those that it is for


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_a_resnet_loads_strictly_into_torchvision_and_timm(library, files, networks, tmp_path):
    convert(files["resnet"], tmp_path / "out.pth", library)
    state = torch.load(tmp_path / "out.pth", weights_only=True)
    model = torchvision.models.resnet18() if library == "torchvision" else timm.create_model("resnet18", num_classes=0)
    model.fc = nn.Identity()
    model.load_state_dict(state, strict=True)
    same(model.eval(), "resnet", networks)


def test_a_vit_loads_strictly_into_timm_and_from_there_into_torchvision(files, networks, tmp_path):
    convert(files["vit"], tmp_path / "timm.pth", "timm")
    model = layouts.vit()
    model.load_state_dict(torch.load(tmp_path / "timm.pth", weights_only=True), strict=True)
    same(model.eval(), "vit", networks)
    convert(tmp_path / "timm.pth", tmp_path / "tv.pth", "torchvision")
    model = torchvision.models.VisionTransformer(32, 16, 12, 3, 192, 768)
    model.heads = nn.Identity()
    model.load_state_dict(torch.load(tmp_path / "tv.pth", weights_only=True), strict=True)
    same(model.eval(), "vit", networks, 1e-5)
    assert load(tmp_path / "tv.pth").backbone.keys() == model.state_dict().keys(), "torchvision's names stay"
    convert(tmp_path / "tv.pth", tmp_path / "again.pth", "timm")
    again = torch.load(tmp_path / "again.pth", weights_only=True)
    assert all(torch.equal(value, again[name]) for name, value in networks["vit"].state_dict().items())


@pytest.mark.parametrize("kind", ["resnet", "vit"])
def test_a_hugging_face_folder_gives_the_same_features_in_auto_model(kind, files, networks, tmp_path):
    transformers = pytest.importorskip("transformers")
    convert(files[kind], tmp_path / "hf", "huggingface")
    model, report = transformers.AutoModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["unexpected_keys"]
    assert all("pooler" in name for name in report["missing_keys"]), report

    def features(x):
        out = model.eval()(pixel_values=x)
        return out.pooler_output.flatten(1) if kind == "resnet" else out.last_hidden_state[:, 0]

    same(features, kind, networks, 1e-5)
    weights = load(tmp_path / "hf")
    assert weights.format == "huggingface"
    assert all(torch.equal(value, weights.backbone[name]) for name, value in networks[kind].state_dict().items())


@pytest.mark.parametrize("kind", ["ResNet", "ViT"])
def test_folders_of_save_pretrained_are_read_with_classifier_and_without(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "ResNet":
        config = transformers.ResNetConfig(
            hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=5
        )
    else:
        config = transformers.ViTConfig(
            hidden_size=192, num_attention_heads=3, intermediate_size=768, image_size=32, num_labels=5
        )
    model = getattr(transformers, f"{kind}ForImageClassification")(config).eval()
    model.save_pretrained(tmp_path / "whole")
    weights = load(tmp_path / "whole")
    assert weights.left
    assert all("classifier" in name for name in weights.left)
    backbone, _ = weights.build_backbone()
    x = images("resnet" if kind == "ResNet" else "vit")
    base = model.resnet if kind == "ResNet" else model.vit
    with torch.no_grad():
        out = base(pixel_values=x)
        expected = out.pooler_output.flatten(1) if kind == "ResNet" else out.last_hidden_state[:, 0]
        torch.testing.assert_close(backbone.eval()(x), expected, atol=1e-5, rtol=1e-5)
    inner = getattr(transformers, f"{kind}Model")(config)  # its own module calls its parts otherwise than its files
    if kind == "ViT":
        inner.pooler = None
    weights.load_backbone_into(inner)
    with torch.no_grad():
        out = inner.eval()(pixel_values=x)
        got = out.pooler_output.flatten(1) if kind == "ResNet" else out.last_hidden_state[:, 0]
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("part", ["backbone", "encoder"])
def test_onnx_gives_the_same_in_onnxruntime_for_any_batch(part, networks, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    if part == "backbone":
        network = networks["vit"]
        convert(load(network.state_dict()), tmp_path / "out.onnx", "onnx")
    else:
        backbone, _ = build_backbone("resnet18-cifar", image_size=32)
        head = layouts.mlp()
        layouts.trained(backbone)
        network = nn.Sequential(backbone, head).eval()
        weights = dataclasses.replace(load(backbone.state_dict()), projector=dict(head.state_dict()))
        convert(weights, tmp_path / "out.onnx", "onnx", part)
    session = onnxruntime.InferenceSession(tmp_path / "out.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 5):
        x = torch.randn(count, 3, 32, 32)
        (got,) = session.run(None, {"images": x.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(got, network(x).numpy(), atol=1e-4, rtol=1e-4)


def test_detectron2_gets_the_names_of_the_authors_converter(tmp_path):
    """Against the documented list of detectron2's R-50 (modeling/backbone/resnet.py at 02b5c4e), for C4 and FPN alike."""
    with torch.device("meta"):
        shapes = torchvision.models.resnet50().state_dict()
    state = {name: torch.randn(value.shape) if value.ndim else torch.tensor(1) for name, value in shapes.items()}
    convert(load(state), tmp_path / "r50.pkl", "detectron2")
    content = pickle.loads((tmp_path / "r50.pkl").read_bytes())
    assert content["matching_heuristics"] is True
    norm = ("weight", "bias", "running_mean", "running_var")
    expected = {"stem.conv1.weight", *(f"stem.conv1.norm.{leaf}" for leaf in norm)}
    for stage, blocks in zip((2, 3, 4, 5), (3, 4, 6, 3), strict=True):
        for block in range(blocks):
            for conv in ("conv1", "conv2", "conv3", *(["shortcut"] if block == 0 else [])):
                name = f"res{stage}.{block}.{conv}"
                expected |= {f"{name}.weight", *(f"{name}.norm.{leaf}" for leaf in norm)}
    assert content["model"].keys() == expected
    np.testing.assert_array_equal(content["model"]["res5.2.conv3.norm.bias"], state["layer4.2.bn3.bias"].numpy())
    again = load(tmp_path / "r50.pkl")  # numpy arrays alone, without trust
    assert again.format == "detectron2"
    assert again.architecture.name == "resnet50"
    assert torch.equal(again.backbone["layer1.0.downsample.0.weight"], state["layer1.0.downsample.0.weight"])
    again.build_backbone()


def test_mmengine_loads_the_backbone_by_its_prefix(files, networks, tmp_path):
    mmengine = pytest.importorskip("mmengine.model")
    convert(files["resnet"], tmp_path / "out.pth", "mmengine")
    model = layouts.bare_resnet()
    mmengine.PretrainedInit(checkpoint=str(tmp_path / "out.pth"), prefix="backbone.")(model)
    same(model.eval(), "resnet", networks)


def test_the_authors_main_lincls_takes_it(files, tmp_path):
    """Its steps (facebookresearch/moco at 5df3287, main_lincls.py): names of the query encoder but for ``fc``, strict=False,
    and exactly the classifier may be missing.
    """
    convert(files["resnet"], tmp_path / "out.pth.tar", "moco")
    state = torch.load(tmp_path / "out.pth.tar", weights_only=True)["state_dict"]
    start = "module.encoder_q."
    kept = {k[len(start) :]: v for k, v in state.items() if k.startswith(start) and not k.startswith(start + "fc")}
    message = torchvision.models.resnet18().load_state_dict(kept, strict=False)
    assert set(message.missing_keys) == {"fc.weight", "fc.bias"}
    assert not message.unexpected_keys


def test_knn_of_a_converted_backbone_is_the_same(files, networks, tmp_path):
    convert(files["resnet"], tmp_path / "a.safetensors", "safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "b.pth", "mmengine")
    model, _ = load(tmp_path / "b.pth").build_backbone()
    x, labels = torch.randn(40, 3, 64, 64), torch.arange(40) % 4
    x += labels[:, None, None, None] * 0.2

    def accuracy(backbone):
        with torch.no_grad():
            features = backbone.eval()(x)
        return knn_accuracy(features[:24], labels[:24], features[24:], labels[24:], k=5)

    assert accuracy(model) == accuracy(networks["resnet"])


def test_our_own_files_are_read_wherever_they_lie(tmp_path):
    torch.manual_seed(0)
    moco = MoCo(layouts.bare_resnet(), 512, queue_size=16, projection_dim=8, hidden_dim=12)
    moco.boundary.reset(5)
    for prefix in ("", "moco.", "method.", "module.method."):
        state = {prefix + name: value for name, value in moco.state_dict().items()}
        torch.save({"state_dict": state} if prefix else state, tmp_path / "own.pth")
        weights = load(tmp_path / "own.pth")
        assert weights.format == "moco-plugins"
        again = weights.build_moco(image_size=64)
        for name, value in moco.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name
