"""``load``: what it says of a file, and what it refuses."""

import os
import pickle
import zipfile

import pytest
import timm
import torch
import torchvision
from torch import nn

from moco_plugins import MoCo
from moco_plugins.backbones import build_backbone
from moco_plugins.checkpoints import Architecture, Weights, convert, load


@pytest.fixture(scope="module")
def resnet18():
    torch.manual_seed(0)
    return torchvision.models.resnet18().eval()


def features(model, images):
    with torch.no_grad():
        return model.eval()(images)


def save(content, path):
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "wide_resnet50_2", "resnext50_32x4d", "vit_b_16", "convnext_tiny"]
)
def test_torchvision_models_are_recognised_from_names_and_shapes(name):
    with torch.device("meta"):
        state = torchvision.models.get_model(name).state_dict()
    weights = load(state)
    assert (weights.format, weights.architecture) == ("torchvision", Architecture(name))
    assert any("weight" in classifier for classifier in weights.left), "the classifier is left out by name"
    assert weights.parts == ("backbone",)


@pytest.mark.parametrize(
    ("name", "size"), [("vit_tiny_patch16_224", 224), ("vit_small_patch32_224", 64), ("vit_base_patch8_224", 32)]
)
def test_timm_vits_are_recognised_with_the_size_of_their_images(name, size):
    with torch.device("meta"):
        state = timm.create_model(name, img_size=size, in_chans=1).state_dict()
    weights = load(state)
    assert (weights.format, weights.architecture) == ("timm", Architecture(f"timm/{name}", 1, size))


def test_a_cifar_stem_and_its_channels_are_recognised():
    state = build_backbone("resnet18-cifar", channels=4, image_size=32)[0].state_dict()
    assert load(state).architecture == Architecture("resnet18-cifar", 4, 32)
    state = build_backbone("convnet", channels=1, image_size=28)[0].state_dict()
    assert load(state).architecture == Architecture("convnet", 1, 32)


@pytest.mark.parametrize("wrap", ["", "0.", "module.", "backbone.", "module.backbone."])
def test_a_backbone_is_found_in_what_it_was_wrapped_in(wrap, resnet18, tmp_path):
    # "0." is what version 0.1.0 of this project wrote.
    state = {f"{wrap}{name}": value for name, value in resnet18.state_dict().items() if not name.startswith("fc.")}
    model, width = load(save({"state_dict": state}, tmp_path / "a.pth")).build_backbone(64)
    assert width == 512
    images = torch.randn(2, 3, 64, 64)
    bare = nn.Sequential(*list(resnet18.children())[:-1], nn.Flatten())
    torch.testing.assert_close(features(model, images), features(bare, images))


def test_layers_in_a_sequential_are_named_again(resnet18):
    bare = nn.Sequential(*list(resnet18.children())[:-1])
    weights = load(bare.state_dict())
    assert weights.architecture == Architecture("resnet18")
    assert torch.equal(weights.backbone["layer3.1.bn2.bias"], bare[6][1].bn2.bias)


def test_unknown_networks_load_where_they_are_known(tmp_path):
    network = nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    weights = load(save(network.state_dict(), tmp_path / "own.pt"))
    assert weights.format == "state-dict"
    assert weights.architecture is None
    moco = MoCo(nn.Sequential(nn.Conv2d(3, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 5, queue_size=8)
    weights.load_into(moco)
    assert torch.equal(moco.query_encoder.backbone[0].weight, network[0].weight)
    with pytest.raises(ValueError, match=r"not recognised from names such as 0\.weight, 0\.bias; name it: --arch"):
        weights.build_backbone()


def test_what_does_not_fit_is_said_by_name(resnet18):
    weights = load(resnet18.state_dict())
    grey = MoCo(build_backbone("resnet18", channels=1)[0], 512, queue_size=8)
    before = grey.query_encoder.backbone.fc, grey.query_encoder.backbone.conv1.weight.clone()
    with pytest.raises(
        ValueError, match=r"conv1.weight is \(64, 3, 7, 7\) there and \(64, 1, 7, 7\) here.*images of 3 channels"
    ):
        weights.load_into(grey)
    assert torch.equal(before[1], grey.query_encoder.backbone.conv1.weight), "nothing is changed"
    with pytest.raises(ValueError, match="another stem"):
        weights.load_into(MoCo(build_backbone("resnet18-cifar", image_size=32)[0], 512, queue_size=8))
    with pytest.raises(ValueError, match="are there and not here"):
        weights.load_into(MoCo(build_backbone("convnet", image_size=32)[0], 512, queue_size=8))
    with pytest.raises(ValueError, match="not there"):
        weights.with_architecture("resnet34")
    assert weights.with_architecture("timm/resnet18").architecture == Architecture("timm/resnet18")


def test_position_embeddings_of_another_size_are_resized_only_when_asked():
    state = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=0).state_dict()
    weights = load(state)
    with pytest.raises(ValueError, match=r"pos_embed is \(1, 17, 192\) there and \(1, 5, 192\) here.*interpolate=True"):
        weights.build_backbone(32)
    model, _ = weights.build_backbone(32, interpolate=True)
    assert torch.equal(model.pos_embed[:, 0], state["pos_embed"][:, 0]), "the class token's stays"
    same, _ = weights.build_backbone(64, interpolate=True)
    assert torch.equal(same.pos_embed, state["pos_embed"])


def test_without_a_key_encoder_it_is_a_copy_of_the_query_encoder(resnet18):
    moco = MoCo(build_backbone("resnet18", image_size=64)[0], 512, queue_size=8)
    load(resnet18.state_dict()).load_into(moco)
    assert torch.equal(moco.key_encoder.backbone.conv1.weight, resnet18.conv1.weight)
    assert moco.steps == 0


# Files that are damaged, foreign, or want more than they may


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_nothing_in_a_file_is_executed_and_trust_is_the_way_out(tmp_path, monkeypatch, resnet18):
    monkeypatch.chdir(tmp_path)
    path = save({"state_dict": resnet18.state_dict(), "args": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"may run code when it is read.*--trust"):
        load(path)
    for name in ("evil.pkl", "old.pth"):
        (tmp_path / name).write_bytes(pickle.dumps({"model": Evil()}))
        with pytest.raises(ValueError, match=r"may run code|damaged"):
            load(tmp_path / name)
    assert not (tmp_path / "evil").exists()
    assert load(path, trust=True).architecture == Architecture("resnet18")
    assert (tmp_path / "evil").exists()


def test_damaged_and_foreign_files_get_one_sentence(tmp_path, resnet18):
    whole = save(resnet18.state_dict(), tmp_path / "whole.pth").read_bytes()
    files = {
        "cut.pth": (whole[: len(whole) // 2], "damaged or cut off"),
        "cut.safetensors": (b"\x10\x00\x00\x00\x00\x00\x00\x00{}", "damaged or cut off"),
        "empty.pth": (b"", "empty"),
        "picture.png": (b"\x89PNG\r\n", "it is no checkpoint"),
        "lfs.pth": (b"version https://git-lfs", "Git LFS"),
        "text.pkl": (b"\x80\x04}.", "of no known format"),
    }
    for name, (content, message) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            load(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load(tmp_path / "absent.pth")
    with pytest.raises(ValueError, match=r"without config\.json"):
        load(tmp_path)
    with pytest.raises(ValueError, match="holds a list"):
        load(save([1], tmp_path / "list.pth"))


def test_declared_sizes_are_checked_before_memory_is_taken(tmp_path):
    path = save({"conv.weight": torch.zeros(1).expand(2**40)}, tmp_path / "wide.pth")
    assert path.stat().st_size < 10_000
    with pytest.raises(ValueError, match=r"conv.weight declares shape \(1099511627776,\)"):
        load(path)
    with zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**6))
    with pytest.raises(ValueError, match="declares 1000000 bytes"):
        load(tmp_path / "bomb.pth")


def test_half_of_a_key_encoder_is_refused_and_not_counted_as_trained(resnet18):
    bare = {name: value for name, value in resnet18.state_dict().items() if not name.startswith("fc.")}
    state = {f"encoder_q.{name}": value for name, value in bare.items()}
    state |= {f"encoder_k.{name}": value for name, value in bare.items() if "layer4" not in name}
    with pytest.raises(ValueError, match=r"query and key encoder differ in .* names"):
        load(state)


def test_weights_pass_through(resnet18):
    weights = load(resnet18.state_dict())
    assert isinstance(weights, Weights)
    assert load(weights) is weights
    told = weights.describe()
    assert "resnet18 (3 channels, 224 px)" in told
    assert "fc.weight" in told
    assert "120 tensors, 11,186,132 numbers" in told


def test_what_bench_and_pretrain_keep(tmp_path):
    from moco_plugins.bench.run.weights import write_weights

    backbone, _ = build_backbone("resnet18-cifar", channels=1, image_size=28)
    about = {
        "backbone": "resnet18-cifar",
        "channels": 1,
        "image_size": 28,
        "mean": [0.1],
        "std": [0.2],
        "method": "moco-v2",
    }
    torch.save({"state_dict": backbone.state_dict(), **about}, tmp_path / "backbone.pt")
    write_weights(backbone.state_dict(), about, tmp_path)
    for path in (tmp_path / "backbone.pt", tmp_path, tmp_path / "weights.safetensors"):
        weights = load(path)
        assert weights.format == "moco-plugins-backbone"
        assert weights.architecture == Architecture("resnet18-cifar", 1, 28)
        assert weights.about["mean"] == [0.1]
        again, _ = weights.build_backbone()
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in backbone.state_dict().items())


def test_names_of_compiled_and_distributed_models_are_seen_through(resnet18):
    state = {f"module._orig_mod.{name}": value for name, value in resnet18.state_dict().items()}
    assert load(state).architecture == Architecture("resnet18")


def test_shards_outside_of_the_folder_are_not_read(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "resnet"}')
    index = '{"weight_map": {"a": "../secret.safetensors"}}'
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"names \.\./secret\.safetensors, which is not in the folder"):
        load(tmp_path / "hf")


def test_what_a_file_says_of_its_images_goes_along(tmp_path):
    backbone, _ = build_backbone("convnet", channels=1, image_size=(28, 56))
    about = {"backbone": "convnet", "channels": 1, "image_size": [28, 56], "mean": [0.1], "std": [0.2]}
    torch.save({"state_dict": backbone.state_dict(), **about}, tmp_path / "backbone.pt")
    convert(tmp_path / "backbone.pt", tmp_path / "out.safetensors", "safetensors")
    weights = load(tmp_path / "out.safetensors")
    assert weights.architecture == Architecture("convnet", 1, (28, 56))
    assert weights.about["mean"] == [0.1]
