"""Bad input to MoCo: the error names the argument, its value and the cure."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from reference import small_backbone, small_views
from torch import Tensor, nn

from moco_plugins import MoCo
from moco_plugins.hooks.manager import UnknownNameError


def build(**options: Any) -> MoCo:
    arguments = {"backbone": small_backbone(), "feature_dim": 16, "queue_size": 20, "projection_dim": 8, **options}
    return MoCo(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "v4"}, r"variant='v4'.*v1, v2, v2\+, v3"),
        ({"queue_size": -1}, "queue_size=-1.*at least 0"),
        ({"queue_size": 1.5}, "queue_size=1.5.*whole number"),
        ({"queue_size": 0}, "queue_size=0.*queue_size of at least 1.*in_batch_negatives=True"),
        ({"projection_dim": 0}, "projection_dim=0.*at least 1"),
        ({"projection_layers": 0}, "projection_layers=0.*at least 1"),
        ({"hidden_dim": 0}, "hidden_dim=0.*at least 1"),
        ({"feature_dim": 0}, "feature_dim=0.*at least 1"),
        ({"feature_dim": "512"}, "feature_dim='512'.*whole number"),
        ({"bn_splits": 0}, "bn_splits=0.*at least 1"),
        ({"drift_probe": -1}, "drift_probe=-1.*at least 0"),
        ({"temperature": 0}, "temperature=0.*greater than 0"),
        ({"temperature": -0.1}, "temperature=-0.1.*greater than 0"),
        ({"temperature": math.nan}, "temperature=nan.*greater than 0"),
        ({"temperature": lambda step, total: 0.0}, "temperature=.*greater than 0"),
        ({"momentum": 1.1}, r"momentum=1.1.*\[0, 1\]"),
        ({"momentum": -0.1}, r"momentum=-0.1.*\[0, 1\]"),
        ({"momentum": math.nan}, r"momentum=nan.*\[0, 1\]"),
        ({"momentum": lambda step, total: 2.0}, r"momentum=.*2.0.*\[0, 1\]"),
        ({"momentum": 0.001}, "momentum=0.001.*kept.*MMEngine.*0.999.*allow_low_momentum=True"),
        ({"momentum": 0.4}, "momentum=0.4.*kept.*0.6.*allow_low_momentum=True"),
        ({"bn_buffers": "mean"}, "bn_buffers='mean'.*'own', 'copy' or 'ema'"),
        ({"shuffle_bn": "yes"}, "shuffle_bn='yes'.*'auto', True or False"),
        ({"queue_fill": "zeros"}, "fill='zeros'.*'random' or 'empty'"),
        ({"queue_resize": "crop"}, "resize='crop'.*'error' or 'keep_newest'"),
        ({"freeze_patch_projection": True}, "freeze_patch_projection=True.*Sequential.*conv_proj.*patch_embed.proj"),
    ],
    ids=lambda value: ", ".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_low_momentum_may_be_asked_for() -> None:
    for momentum in (0, 0.0, 0.3, 0.5, 1, 1.0):
        assert build(momentum=momentum, allow_low_momentum=momentum < 0.5).momentum == momentum


@pytest.mark.parametrize("backbone", ["resnet50", None, lambda images: images])
def test_backbone_that_is_no_module(backbone: object) -> None:
    with pytest.raises(TypeError, match=r"backbone=.*torch\.nn\.Module"):
        build(backbone=backbone)


def test_backbone_whose_parameters_have_no_shape_yet() -> None:
    with pytest.raises(ValueError, match=r"backbone.*1\.weight.*one batch"):
        build(backbone=nn.Sequential(nn.Flatten(), nn.LazyLinear(16)))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("queue", "queue='nothing'.*Built in: ring"),
        ("loss", "loss='nothing'.*Built in: info_nce"),
        ("momentum_rule", "momentum_rule='nothing'.*Built in: ema"),
    ],
)
def test_part_that_no_plugin_provides(option: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        build(**{option: "nothing"})


class Uncopyable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = small_backbone()

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(images)

    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopyable:
        raise RuntimeError("holds a file handle")


def test_backbone_that_cannot_be_copied() -> None:
    with pytest.raises(TypeError, match=r"(?s)backbone.*Uncopyable.*file handle.*key_encoder="):
        build(backbone=Uncopyable())
    # The way out that the message names: another one, which then starts equal.
    moco = build(backbone=Uncopyable(), key_encoder=Uncopyable())
    for query, key in zip(moco.query_encoder.parameters(), moco.key_encoder.parameters(), strict=True):
        assert torch.equal(query, key)
        assert query.data_ptr() != key.data_ptr()
    moco(small_views(4, torch.float32)).backward()


def test_tensors_with_a_graph_cannot_be_copied_either() -> None:
    backbone = small_backbone()
    backbone.register_buffer("scale", torch.ones(1, requires_grad=True) * 2)  # no leaf: torch refuses to copy it
    with pytest.raises(TypeError, match=r"(?s)backbone.*key_encoder="):
        build(backbone=backbone)


@pytest.mark.parametrize(
    ("key_encoder", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 16)), "key_encoder.*parameters.*missing"),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16)), r"key_encoder.*\(20, 12\)"),
        (small_backbone(batch_norm=True), "key_encoder.*(extra|missing)"),
    ],
)
def test_key_encoder_of_another_architecture(key_encoder: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(key_encoder=key_encoder)


def test_key_encoder_that_is_the_backbone() -> None:
    backbone = small_backbone()
    with pytest.raises(ValueError, match="key_encoder is the backbone"):
        build(backbone=backbone, key_encoder=backbone)


def test_key_encoder_that_shares_weights_with_the_backbone() -> None:
    # Both would move together, and every query would be compared with itself.
    first, second = small_backbone(), small_backbone()
    second[1].weight = first[1].weight
    with pytest.raises(ValueError, match=r"key_encoder shares 1 parameters"):
        build(backbone=first, key_encoder=second)


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value, self.weight = value, nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Any:
        return self.value(images) if callable(self.value) else self.value


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (lambda x: torch.zeros(len(x), 20), ValueError, r"backbone.*\(4, 20\).*feature_dim=16.*feature_dim=20"),
        (lambda x: torch.zeros(len(x), 16, 7, 7), ValueError, r"backbone.*\(4, 16, 7, 7\).*pool and flatten"),
        (lambda x: torch.zeros(16), ValueError, r"backbone.*\(16,\).*\(4, 16\)"),
        (lambda x: torch.zeros(len(x) + 1, 16), ValueError, r"backbone.*\(5, 16\).*\(4, 16\)"),
        (lambda x: [torch.zeros(len(x), 16)], TypeError, r"backbone returned a list.*\(4, 16\)"),
        (lambda x: {"logits": torch.zeros(len(x), 16)}, TypeError, r"backbone returned a dict.*\(4, 16\)"),
        (lambda x: None, TypeError, "backbone returned a NoneType"),
    ],
    ids=["width", "feature map", "one row", "rows", "list", "dict", "None"],
)
def test_backbone_whose_output_is_not_one_row_of_features_an_image(
    value: Any, error: type[Exception], message: str
) -> None:
    moco = build(backbone=Returns(value))
    with pytest.raises(error, match=message):
        moco(small_views(4, torch.float32))
    with pytest.raises(error, match=message):
        moco.embed(small_views(4, torch.float32)[0])


def test_a_wrong_number_of_rows_is_not_cured_by_feature_dim() -> None:
    with pytest.raises(ValueError) as caught:
        build(backbone=Returns(lambda x: torch.zeros(len(x) + 1, 16)))(small_views(4, torch.float32))
    assert "pass feature_dim=16" not in str(caught.value)


def test_a_backbone_that_ends_in_a_classifier_is_named_with_the_cure() -> None:
    from torchvision.models import resnet18

    images = [torch.rand(2, 3, 32, 32), torch.rand(2, 3, 32, 32)]
    moco = build(backbone=resnet18(), feature_dim=512)
    with pytest.raises(
        ValueError, match=r"classifier, fc: its 1000 .*backbone\.fc = torch\.nn\.Identity.*build_backbone"
    ):
        moco(images)
    moco = build(backbone=resnet18(), feature_dim=512)
    moco.query_encoder.backbone.fc = moco.key_encoder.backbone.fc = nn.Identity()  # the cure
    assert torch.isfinite(moco(images))
    with pytest.raises(ValueError, match=r"classifier, heads\.head.*feature_dim=768"):
        _tiny_vit()(images)


def _tiny_vit() -> MoCo:
    from torchvision.models import VisionTransformer

    vit = VisionTransformer(image_size=32, patch_size=16, num_layers=1, num_heads=2, hidden_dim=768, mlp_dim=8)
    return build(backbone=vit, feature_dim=512)


IMAGES = torch.randn(4, 3, 2, 2)


@pytest.mark.parametrize(
    ("views", "error", "message"),
    [
        (IMAGES, TypeError, r"views is a tensor of shape \(4, 3, 2, 2\).*two views"),
        (torch.stack([IMAGES, IMAGES + 1]), TypeError, r"views is a tensor of shape \(2, 4, 3, 2, 2\).*two views"),
        ([IMAGES], TypeError, "views is a list of 1.*two views.*TwoViews"),
        ([IMAGES, IMAGES + 1, IMAGES + 2], TypeError, "views is a list of 3.*two views"),
        ({"image": IMAGES}, TypeError, "views is a dict.*two views"),
        (None, TypeError, "views is a NoneType.*two views"),
        (["a", "b"], TypeError, "views holds str and str.*tensors"),
        ([IMAGES, None], TypeError, "views holds Tensor and NoneType.*tensors"),
        ([IMAGES, IMAGES[:3] + 1], ValueError, r"views.*\(4, 3, 2, 2\).*\(3, 3, 2, 2\).*same N"),
        ([IMAGES[:0], IMAGES[:0] + 1], ValueError, r"views.*\(0, 3, 2, 2\).*N >= 1"),
        ([torch.tensor(1.0), torch.tensor(2.0)], ValueError, r"views.*\(\)"),
        ([IMAGES, IMAGES], ValueError, "views are twice the same tensor.*TwoViews"),
        ([IMAGES, IMAGES[:]], ValueError, "views are twice the same tensor.*TwoViews"),
        ([IMAGES, IMAGES.detach()], ValueError, "views are twice the same tensor.*TwoViews"),
        ([IMAGES, IMAGES.view(4, 3, 2, 2)], ValueError, "views are twice the same tensor.*TwoViews"),
    ],
    ids=[
        "one tensor",
        "stacked",
        "one view",
        "three views",
        "dict",
        "None",
        "strings",
        "half",
        "other N",
        "no image",
        "scalars",
        "same object",
        "same memory",
        "detached",
        "viewed",
    ],
)
@pytest.mark.parametrize("train", [True, False])
def test_bad_views(views: Any, error: type[Exception], message: str, train: bool) -> None:
    moco = build().train(train)
    before = {name: value.clone() for name, value in moco.state_dict().items()}
    with pytest.raises(error, match=message):
        moco(views)
    assert all(torch.equal(value, before[name]) for name, value in moco.state_dict().items())


def test_views_of_one_batch_tensor_are_fine() -> None:
    # The two halves of one tensor, and a tuple as well as a list.
    both = torch.randn(8, 3, 2, 2)
    assert torch.isfinite(build()((both[:4], both[4:])))


def test_views_may_be_of_different_sizes() -> None:
    pooled = nn.Sequential(nn.Conv2d(3, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    moco = build(backbone=pooled)
    assert torch.isfinite(moco([torch.randn(4, 3, 8, 8), torch.randn(4, 3, 6, 6)]))
    assert torch.isfinite(build(backbone=pooled, variant="v2+")([torch.randn(4, 3, 8, 8), torch.randn(4, 3, 6, 6)]))


def test_an_error_in_the_middle_of_a_step_leaves_no_keys_behind() -> None:
    moco = build(variant="v2+")
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    good = small_views(4, torch.float32)
    with pytest.raises(ValueError):
        moco([good[0], good[1][:2]])
    moco(good).backward()
    optimizer.step()
    assert int(moco.queue.filled) == 8


def test_metrics_before_the_first_step_are_empty_and_drift_without_a_probe_names_it() -> None:
    assert build().metrics() == {}
    with pytest.raises(RuntimeError, match="drift_probe=64"):
        build().key_drift()
