"""On demand, in a venv of its own: beside mmpretrain 1.2.0, with its published MoCo v2 config.

    python -m venv beside && beside/bin/pip install "moco-plugins[mmengine]" mmpretrain==1.2.0 mmcv-lite==2.2.0
    beside/bin/python tests/adapters/moco_mmengine/beside_mmpretrain.py

1. mmpretrain's config becomes ours by ``custom_imports`` and another ``model`` alone, and trains on a few images.
2. From the same weights and the same queue, our loss is mmpretrain's over 20 steps: SGD, its ResNet-18 and its neck, a
   batch that divides the queue, one process, without shuffled BatchNorm (in one process mmpretrain's does nothing).
"""

import copy
import pathlib
import sys
import tempfile
import warnings

import numpy as np
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from PIL import Image

PUBLISHED = "mmpretrain::mocov2/mocov2_resnet50_8xb32-coslr-200e_in1k.py"
OURS = f"""
_base_ = {PUBLISHED!r}
custom_imports = dict(imports=['moco_plugins'], allow_failed_imports=False)
model = dict(
    _delete_=True, type='moco_plugins.MoCo', variant='v2', queue_size=64,
    backbone=dict(type='ResNet', depth=18),
    neck=dict(type='MoCoV2Neck', in_channels=512, hid_channels=512, out_channels=128, with_avg_pool=True))
"""


def train_published_config(folder: pathlib.Path) -> None:
    from moco_mmengine.train import main

    noise = np.random.default_rng(0)
    for number in range(16):
        path = folder / "data" / str(number % 2) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    (folder / "ours.py").write_text(OURS)
    cfg = Config.fromfile(str(folder / "ours.py"))
    # Only what a machine without ImageNet needs, and no hue: mmpretrain's overflows under numpy 2.
    cfg.train_dataloader.update(batch_size=8, num_workers=0, persistent_workers=False)
    pipeline = cfg.train_dataloader.dataset.pipeline
    views = pipeline[1].transforms[0]
    views[0].scale = 64
    if int(np.__version__.split(".")[0]) >= 2:
        views[1].transforms[0].hue = 0.0
    cfg.train_dataloader.dataset = dict(type="CustomDataset", data_prefix=str(folder / "data"), pipeline=pipeline)  # noqa: C408
    cfg.train_cfg.max_epochs = 2
    cfg.log_level = "WARNING"
    cfg.dump(folder / "small.py")
    main([str(folder / "small.py"), "--work-dir", str(folder / "work")])
    state = torch.load(folder / "work" / "epoch_2.pth", weights_only=True)["state_dict"]
    assert int(state["method.steps"]) == 4, state["method.steps"]
    assert int(state["method.queue.filled"]) == 32
    print("1. the published config with our model: 4 steps, 32 keys in the queue")


def compare_losses(steps: int = 20) -> float:
    init_default_scope("mmpretrain")
    torch.manual_seed(0)
    backbone = {"type": "ResNet", "depth": 18}
    neck = {"type": "MoCoV2Neck", "in_channels": 512, "hid_channels": 512, "out_channels": 128, "with_avg_pool": True}
    head = {"type": "ContrastiveHead", "loss": {"type": "CrossEntropyLoss"}, "temperature": 0.2}
    preprocessor = {"type": "SelfSupDataPreprocessor"}
    theirs = MODELS.build(
        {
            "type": "mmpretrain.MoCo",
            "backbone": copy.deepcopy(backbone),
            "neck": copy.deepcopy(neck),
            "head": head,
            "queue_len": 64,
            "momentum": 0.1,
            "data_preprocessor": preprocessor,
        }
    )
    ours = MODELS.build(
        {
            "type": "moco_plugins.MoCo",
            "backbone": backbone,
            "neck": neck,
            "queue_size": 64,
            "momentum": 0.9,
            "shuffle_bn": False,
        }
    )
    assert type(theirs).__module__.startswith("mmpretrain")
    assert type(ours).__module__.startswith("moco_mmengine")
    theirs.init_weights()
    encoder = ours.method.query_encoder
    encoder.backbone.backbone.load_state_dict(theirs.backbone.state_dict())
    encoder.projector.neck.load_state_dict(theirs.neck.state_dict())
    ours.method.queue.keys.copy_(theirs.queue.T)
    pair = [(model.train(), torch.optim.SGD(model.parameters(), 0.03, momentum=0.9)) for model in (theirs, ours)]
    worst = 0.0
    for _ in range(steps):
        views = [torch.randn(16, 3, 32, 32), torch.randn(16, 3, 32, 32)]
        losses = []
        for model, optimizer in pair:
            loss = model(list(views), [None] * 16, mode="loss")["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        worst = max(worst, abs(losses[0] - losses[1]))
    queues = (theirs.queue.T - ours.method.queue.keys).abs().max()
    print(
        f"2. {steps} steps: last losses {losses[0]:.6f} (mmpretrain) and {losses[1]:.6f}; largest difference {worst:.1e}, "
    )
    print(f"   of the queues {queues:.1e}")
    return worst


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as where:
        train_published_config(pathlib.Path(where))
    sys.exit(compare_losses() > 1e-4)
