"""On demand, in a venv of its own: weights from and to mmpretrain 1.2.0, built and run as it is.

    python -m venv beside && beside/bin/pip install "moco-plugins[mmengine,timm]" mmpretrain==1.2.0 mmcv-lite==2.2.0
    PYTHONPATH=tests/support beside/bin/python tests/adapters/moco_mmengine/weights_of_mmpretrain.py

1. MoCo and MoCo v3 (ResNet and ViT) of mmpretrain are read: features, heads, key encoder, queue and steps.
2. ``init_cfg=dict(type='Pretrained', checkpoint=..., prefix='backbone.')`` of its backbones takes what ``convert`` writes.
3. What ``convert --to mmengine --part all`` writes loads into its MoCo with strict=True.
4. A backbone that its script has extracted is read.
"""

import pathlib
import tempfile

import mmpretrain.models  # noqa: F401
import torch
from mmengine.registry import init_default_scope
from mmpretrain.registry import MODELS
from torch import nn

from moco_plugins.checkpoints import convert, load

V2_NECK = {"type": "MoCoV2Neck", "in_channels": 512, "hid_channels": 24, "out_channels": 16, "with_avg_pool": True}
VIT = {
    "type": "MoCoV3ViT",
    "arch": {"embed_dims": 192, "num_layers": 12, "num_heads": 3, "feedforward_channels": 768},
    "img_size": 32,
    "patch_size": 16,
    "stop_grad_conv1": True,
}


def v3_neck(width: int, layers: int, last_norm: bool = True, pool: bool = True) -> dict:
    return {
        "type": "NonLinearNeck",
        "in_channels": width,
        "hid_channels": 24,
        "out_channels": 16,
        "num_layers": layers,
        "with_bias": False,
        "with_last_bn": last_norm,
        "with_last_bn_affine": False,
        "with_last_bias": False,
        "with_avg_pool": pool,
        "norm_cfg": {"type": "BN1d"},
    }


def moco() -> nn.Module:
    loss = {"type": "CrossEntropyLoss"}
    return MODELS.build(
        {
            "type": "MoCo",
            "queue_len": 32,
            "feat_dim": 16,
            "backbone": {"type": "ResNet", "depth": 18},
            "neck": V2_NECK,
            "head": {"type": "ContrastiveHead", "temperature": 0.2, "loss": loss},
        }
    )


def moco_v3(vit: bool) -> nn.Module:
    head = {
        "type": "MoCoV3Head",
        "predictor": v3_neck(16, 2, last_norm=vit, pool=False),
        "loss": {"type": "CrossEntropyLoss", "loss_weight": 2},
        "temperature": 0.2,
    }
    backbone = VIT if vit else {"type": "ResNet", "depth": 18, "norm_cfg": {"type": "BN"}}
    neck = v3_neck(192, 3, pool=False) if vit else v3_neck(512, 2)
    return MODELS.build({"type": "MoCoV3", "base_momentum": 0.01, "backbone": backbone, "neck": neck, "head": head})


def change(model: nn.Module) -> None:
    """Give every tensor a value of its own, key encoder included."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.is_floating_point() and value.ndim:
                value.add_(torch.rand_like(value) * 0.05)
            elif name.endswith("steps"):
                value.fill_(70)


def check(model: nn.Module, path: pathlib.Path, size: int) -> None:
    change(model)
    torch.save({"meta": {"epoch": 2}, "state_dict": model.state_dict()}, path)
    weights = load(path)
    assert weights.format == "mmengine", weights.format
    assert not weights.left, weights.left
    ours = weights.build_moco(image_size=size).eval()
    model.eval()
    x = torch.randn(3, 3, size, size)
    with torch.no_grad():
        features = model.backbone(x)
        pooled = features[0].mean((2, 3)) if features[0].ndim == 4 else features[0]
        near(ours.embed(x), pooled)
        near(ours.query_encoder(x), model.neck(features)[0])
        key = model.encoder_k if hasattr(model, "encoder_k") else model.momentum_encoder
        near(ours.key_encoder(x), key.module(x)[0])
        if ours.predictor is not None:
            near(ours.predictor(ours.query_encoder(x)), model.head.predictor(model.neck(features))[0])
    if ours.queue is not None:
        assert torch.equal(ours.queue.keys, model.queue.T)
    assert ours.steps == 70
    whole = path.with_suffix(".again.pth")
    convert(path, whole, "mmengine", part="all", force=True)
    missing, unexpected = model.load_state_dict(torch.load(whole, weights_only=True)["state_dict"], strict=False)
    assert not missing, missing
    assert not unexpected, unexpected
    extracted = {
        name.removeprefix("backbone."): v for name, v in model.state_dict().items() if name.startswith("backbone.")
    }
    backbone, _ = load({"state_dict": extracted, "author": "MMSelfSup"}).build_backbone(size)
    with torch.no_grad():
        near(backbone.eval()(x), pooled)


def near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def main() -> None:
    init_default_scope("mmpretrain")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        models = {"MoCo": (moco(), 64), "MoCo v3, ResNet": (moco_v3(False), 64), "MoCo v3, ViT": (moco_v3(True), 32)}
        for title, (model, size) in models.items():
            check(model, folder / "checkpoint.pth", size)
            print(f"{title}: read, written and read again")
        for title, config in (("ResNet", {"type": "ResNet", "depth": 18}), ("ViT", VIT)):
            source = models["MoCo" if title == "ResNet" else "MoCo v3, ViT"][0]
            size = 64 if title == "ResNet" else 32
            torch.save({"state_dict": source.state_dict()}, folder / "in.pth")
            convert(folder / "in.pth", folder / f"{title}.pth", "mmengine")
            pretrained = {"type": "Pretrained", "checkpoint": str(folder / f"{title}.pth"), "prefix": "backbone."}
            backbone = MODELS.build({**config, "init_cfg": pretrained})
            backbone.init_weights()
            backbone.eval()
            x = torch.randn(2, 3, size, size)
            with torch.no_grad():
                near(backbone(x)[0], source.backbone(x)[0])
            print(f"{title}: init_cfg takes it")


if __name__ == "__main__":
    main()
