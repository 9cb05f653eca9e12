"""The numbers of the papers, each with its source.

v1: He et al. 2020, arXiv:1911.05722. v2: Chen, Fan, Girshick & He 2020, arXiv:2003.04297.
v2+: v2 with the symmetric loss, Chen & He 2021, arXiv:2011.10566, table 4. v3: Chen, Xie & He 2021, arXiv:2104.02057.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from reference import small_backbone, small_views
from torch import nn

from moco_plugins import KeyQueue, MoCo

WIDTH = 2048  # ResNet-50


class Features(nn.Module):
    """As wide as a ResNet-50, without its cost."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, width) / 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) @ self.weight


def build(variant: str, **options: Any) -> MoCo:
    # The queue is the size of the paper unless said otherwise, which costs 32 MiB for a moment.
    return MoCo(Features(), WIDTH, variant, **options)


def layers(head: nn.Module) -> list[str]:
    """A head in words: every layer with its widths."""
    words = []
    for layer in head:
        if isinstance(layer, nn.Linear):
            bias = "" if layer.bias is not None else ", no bias"
            words.append(f"Linear({layer.in_features}, {layer.out_features}{bias})")
        elif isinstance(layer, nn.BatchNorm1d):
            words.append(f"BatchNorm({layer.num_features}{'' if layer.affine else ', no affine'})")
        else:
            words.append(type(layer).__name__)
    return words


def test_v1() -> None:
    moco = build("v1")
    assert layers(moco.query_encoder.projector) == [
        "Linear(2048, 128)"
    ]  # section 3.3: a fixed-dimensional output, 128-D
    assert moco.temperature == 0.07  # section 3.3
    assert moco.momentum == 0.999  # section 3.2 and 4.1
    assert moco.queue.keys.shape == (65536, 128)  # section 4.1
    assert moco.predictor is None
    assert not moco.settings.symmetric
    assert not moco.settings.in_batch_negatives
    assert moco.settings.shuffle_bn  # section 3.3


def test_v2() -> None:
    moco = build("v2")
    # Section 3: a 2-layer MLP head, hidden layer 2048-d with ReLU.
    assert layers(moco.query_encoder.projector) == ["Linear(2048, 2048)", "ReLU", "Linear(2048, 128)"]
    assert moco.temperature == 0.2  # section 3, table of temperatures
    assert moco.momentum == 0.999
    assert moco.queue.keys.shape == (65536, 128)
    assert moco.predictor is None
    assert not moco.settings.symmetric
    assert not moco.settings.in_batch_negatives
    assert moco.settings.shuffle_bn


def test_v2_plus_is_v2_with_the_symmetric_loss() -> None:
    plus, plain = build("v2+", queue_size=64), build("v2", queue_size=64)
    assert plus.settings.symmetric
    assert layers(plus.query_encoder.projector) == layers(plain.query_encoder.projector)
    assert (plus.temperature, plus.momentum) == (plain.temperature, plain.momentum)
    assert not plus.settings.in_batch_negatives


def test_v3() -> None:
    moco = build("v3", total_steps=1000)
    # Section 4.1: projection head of 3 layers, prediction head of 2; hidden layers 4096-d, outputs 256-d; BatchNorm after
    # each linear layer, ReLU after hidden ones only. As in the authors' code, no bias, and no affine at the output.
    assert layers(moco.query_encoder.projector) == [
        "Linear(2048, 4096, no bias)",
        "BatchNorm(4096)",
        "ReLU",
        "Linear(4096, 4096, no bias)",
        "BatchNorm(4096)",
        "ReLU",
        "Linear(4096, 256, no bias)",
        "BatchNorm(256, no affine)",
    ]
    assert layers(moco.predictor) == [
        "Linear(256, 4096, no bias)",
        "BatchNorm(4096)",
        "ReLU",
        "Linear(4096, 256, no bias)",
        "BatchNorm(256, no affine)",
    ]
    assert moco.queue is None  # section 3: the memory queue is abandoned
    assert moco.settings.symmetric  # algorithm 1
    assert moco.settings.in_batch_negatives  # algorithm 1: the other keys of the batch
    assert moco.temperature == 0.2  # section 4.1
    # Section 4.1: m is 0.99 and increased to 1 by a half-cycle cosine schedule.
    assert moco.momentum == pytest.approx(0.99)
    assert moco.settings.momentum(500, 1000) == pytest.approx(0.995)
    assert moco.settings.momentum(1000, 1000) == 1.0
    assert not moco.settings.shuffle_bn
    # The predictor belongs to the queries alone.
    assert not any("predictor" in name for name, _ in moco.key_encoder.named_modules())


def test_defaults_of_the_public_names() -> None:
    moco = inspect.signature(MoCo).parameters
    assert moco["variant"].default == "v2"
    assert list(moco)[:7] == [
        "backbone",
        "feature_dim",
        "variant",
        "queue_size",
        "projection_dim",
        "momentum",
        "temperature",
    ]
    assert inspect.signature(KeyQueue).parameters["fill"].default == "random"


@pytest.mark.parametrize(
    ("option", "value", "attribute"),
    [
        ("temperature", 0.5, lambda m: m.temperature),
        ("momentum", 0.9, lambda m: m.momentum),
        ("symmetric", True, lambda m: m.settings.symmetric),
        ("symmetric", False, lambda m: m.settings.symmetric),
        ("in_batch_negatives", True, lambda m: m.settings.in_batch_negatives),
        ("queue_size", 96, lambda m: m.queue.size),
        ("projection_dim", 24, lambda m: m.query_encoder.projector[-2 if m.variant == "v3" else -1].out_features),
        ("projection_layers", 4, lambda m: sum(isinstance(x, nn.Linear) for x in m.query_encoder.projector)),
        ("predictor", True, lambda m: m.predictor is not None),
        ("predictor", False, lambda m: m.predictor is not None),
        ("head_batch_norm", True, lambda m: any(isinstance(x, nn.BatchNorm1d) for x in m.query_encoder.projector)),
        ("head_batch_norm", False, lambda m: any(isinstance(x, nn.BatchNorm1d) for x in m.query_encoder.projector)),
        ("shuffle_bn", True, lambda m: m.settings.shuffle_bn),
        ("shuffle_bn", False, lambda m: m.settings.shuffle_bn),
    ],
)
@pytest.mark.parametrize("variant", ["v1", "v2", "v2+", "v3"])
def test_every_option_can_be_set_on_its_own(variant: str, option: str, value: Any, attribute: Any) -> None:
    options = {"queue_size": 40, "hidden_dim": 12, option: value}
    if (variant, option) == ("v3", "projection_dim"):
        options["head_batch_norm"] = True
    moco = MoCo(small_backbone(), 16, variant, **options)
    if not (option == "projection_dim" and variant == "v3"):
        assert attribute(moco) == value
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    for _ in range(2):
        loss = moco(small_views(8, torch.float32))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(loss)
    assert moco.steps == 2
    assert moco.queue.keys.shape == (
        options["queue_size"],
        options.get("projection_dim", 256 if variant == "v3" else 128),
    )
    with torch.no_grad():
        assert moco.query_encoder(small_views(8, torch.float32)[0]).shape == (8, moco.queue.dim)


def torchvision_vit() -> tuple[nn.Module, str]:
    from torchvision.models import VisionTransformer

    vit = VisionTransformer(image_size=16, patch_size=8, num_layers=1, num_heads=2, hidden_dim=16, mlp_dim=16)
    vit.heads = nn.Identity()
    return vit, "conv_proj"


def timm_vit() -> tuple[nn.Module, str]:
    timm = pytest.importorskip("timm")
    vit = timm.models.VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=0)
    return vit, "patch_embed.proj"


@pytest.mark.parametrize("make_vit", [torchvision_vit, timm_vit])
def test_v3_does_not_train_a_vits_patch_projection(make_vit: Any) -> None:
    # Section 4.2: a random, fixed patch projection removes the instability of training.
    vit, name = make_vit()
    moco = MoCo(vit, 16, "v3", hidden_dim=12, projection_dim=8, momentum=0.9)
    patches = vit.get_submodule(name)
    assert not any(p.requires_grad for p in patches.parameters())
    before = {key: value.clone() for key, value in vit.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in moco.parameters() if p.requires_grad], 0.5)
    for _ in range(2):
        moco([torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16)]).backward()
        optimizer.step()
        optimizer.zero_grad()
    fixed = {key for key, value in vit.state_dict().items() if torch.equal(value, before[key])}
    assert {f"{name}.weight", f"{name}.bias"} <= fixed
    assert len(fixed) < len(before) / 2
    for query, key in zip(
        patches.parameters(), moco.key_encoder.backbone.get_submodule(name).parameters(), strict=True
    ):
        assert torch.equal(query, key)
    # Other variants train it, unless asked; v3 trains it when asked.
    assert all(p.requires_grad for p in MoCo(make_vit()[0], 16, "v2", queue_size=8).query_encoder.parameters())
    for variant, option, frozen in (("v2", True, True), ("v3", False, False)):
        vit, name = make_vit()
        MoCo(vit, 16, variant, queue_size=8, hidden_dim=12, freeze_patch_projection=option, in_batch_negatives=True)
        assert all(p.requires_grad is not frozen for p in vit.get_submodule(name).parameters())


def test_v3_with_a_backbone_that_has_no_patch_projection_trains_all_of_it() -> None:
    moco = MoCo(small_backbone(), 16, "v3", hidden_dim=12)
    assert all(p.requires_grad for p in moco.query_encoder.parameters())


def test_v3_with_a_queue_contrasts_with_both() -> None:
    moco = MoCo(small_backbone(), 16, "v3", queue_size=30, hidden_dim=12, projection_dim=8)
    moco(small_views(6, torch.float32))
    assert moco.metrics()["loss_reference"] == pytest.approx(torch.log(torch.tensor(30 + 5 + 1.0)).item())


def test_embed_is_the_backbone_without_head() -> None:
    for variant in ("v1", "v2", "v2+", "v3"):
        moco = MoCo(small_backbone(), 16, variant, queue_size=8, hidden_dim=12, in_batch_negatives=True).eval()
        images = small_views(5, torch.float32)[0]
        assert moco.feature_dim == 16
        assert torch.equal(moco.embed(images), moco.query_encoder.backbone(images))


def test_own_projection_head_is_used_and_copied_for_the_keys() -> None:
    head = nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 6))
    moco = MoCo(nn.Flatten(), 12, queue_size=8, projection_dim=6, projector=head)
    assert moco.query_encoder.projector is head
    assert torch.equal(moco.key_encoder.projector[2].weight, head[2].weight)
    assert moco.key_encoder.projector[2].weight is not head[2].weight
    moco([torch.randn(2, 3, 2, 2), torch.randn(2, 3, 2, 2)]).backward()


def test_v3_resnet_is_the_authors_form_around_a_resnet():
    """facebookresearch/moco-v3, MoCo_ResNet: a projector of two layers, a predictor without BatchNorm at its end, T 1."""
    moco = MoCo(nn.Sequential(nn.Flatten(), nn.Linear(12, 6)), 6, "v3-resnet", projection_dim=4, hidden_dim=8)
    kinds = [type(module).__name__ for module in moco.query_encoder.projector]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU", "Linear", "BatchNorm1d"]
    assert [type(module).__name__ for module in moco.predictor] == ["Linear", "BatchNorm1d", "ReLU", "Linear"]
    assert moco.temperature == 1.0
    assert all(module.bias is None for module in moco.predictor if isinstance(module, nn.Linear))
    of_v3 = MoCo(nn.Sequential(nn.Flatten(), nn.Linear(12, 6)), 6, "v3", projection_dim=4, hidden_dim=8).predictor
    assert type(of_v3[-1]).__name__ == "BatchNorm1d"
