"""Two processes on the CPU, started by torchrun, do what one does with the joined batch."""

import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("mmengine")
pytest.importorskip("sklearn")

PARTS = """
import torch
from mmengine.registry import MODELS, TRANSFORMS

@TRANSFORMS.register_module()
class Mirrored:
    def __call__(self, sample):
        image = sample['img'].float() / 255
        return {'inputs': [image, image.flip(-1)]}

@MODELS.register_module()
def plain_backbone():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 24))
"""
CONFIG = """
custom_imports = dict(imports=['moco_plugins', 'mirror_parts'], allow_failed_imports=False)
model = dict(type='moco_plugins.MoCo', backbone=dict(type='plain_backbone'), feature_dim=24, variant='v2+',
             queue_size=128, projection_dim=16, momentum=0.9)
train_dataloader = dict(
    dataset=dict(type='moco_plugins.digits', limit=128, pipeline=[dict(type='Mirrored')]),
    batch_size=BATCH, sampler=dict(type='DefaultSampler', shuffle=True))
val_dataloader = dict(dataset=dict(type='moco_plugins.digits', split='train+test', limit=61), batch_size=50,
                      sampler=dict(type='DefaultSampler', shuffle=False))
val_evaluator = dict(type='moco_plugins.KNNMetric', k=5)
train_cfg = dict(by_epoch=True, max_epochs=3)
val_cfg = dict()
optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9))
default_hooks = dict(logger=dict(type='LoggerHook', interval=1))
randomness = dict(seed=1)
"""


def train(folder, name, batch, *launcher, options=()):
    (folder / "mirror_parts.py").write_text(PARTS)
    (folder / f"{name}.py").write_text(CONFIG.replace("BATCH", str(batch)))
    command = [sys.executable, *launcher, "-m", "moco_plugins", "train", f"{name}.py", "--work-dir", name, *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    checkpoint = folder / name / "epoch_3.pth"
    # gloo processes may abort while they end, after all is written
    assert checkpoint.exists(), run.stdout[-2000:] + run.stderr[-4000:]
    log = next((folder / name).rglob("*.log")).read_text()
    losses = [float(loss) for loss in re.findall(r"Epoch\(train\).* loss: ([\d.]+)", log)]
    scores = [float(score) for score in re.findall(r"knn/top1: ([\d.]+)", log)]
    return torch.load(checkpoint, weights_only=False)["state_dict"], losses, scores


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.fixture(scope="module")
def trained_by_two(tmp_path_factory):
    return train(tmp_path_factory.mktemp("ranks"), "two", 16, *TORCHRUN, options=["--launcher", "pytorch"])


def test_two_processes_equal_one(trained_by_two, tmp_path):
    one, losses, scores = train(tmp_path, "one", 32)
    two, losses_of_first, scores_of_two = trained_by_two
    assert len(losses) == len(losses_of_first) == 12
    assert scores == pytest.approx(scores_of_two, abs=0.02)  # one of 61 images may lie on the border
    assert two.keys() == one.keys()
    for name, value in one.items():
        if name == "method.queue.keys":
            continue
        torch.testing.assert_close(two[name], value, rtol=1e-5, atol=1e-6, msg=name)
    # The same keys; ranks take every other image, so their order inside a batch differs (and K is a multiple of it).
    nearest = torch.cdist(one["method.queue.keys"], two["method.queue.keys"]).min(1)
    assert nearest.values.max() < 1e-3
    assert len(set(nearest.indices.tolist())) == 128


def test_a_queue_that_is_shared_out_is_saved_whole_and_resumed_on_one_and_two_ranks(trained_by_two, tmp_path):
    """MMEngine saves on the first rank alone, and the queue is on both."""
    shared = ["--launcher", "pytorch", "--no-validate", "--cfg-options", "model.gather=sharded"]
    whole, losses, _ = trained_by_two
    state, losses_shared, _ = train(tmp_path, "shared", 16, *TORCHRUN, options=shared)
    assert losses_shared == pytest.approx(losses, abs=1e-4)
    assert state["method.queue.keys"].shape == (128, 16)
    for name, value in whole.items():
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-5, msg=name)
    for name, batch, start, options in (("again", 16, TORCHRUN, shared), ("alone", 32, [], ["--no-validate"])):
        shutil.copytree(tmp_path / "shared", tmp_path / name)
        (tmp_path / name / "epoch_3.pth").unlink()
        first = str(tmp_path / name / "epoch_2.pth")
        resumed, _, _ = train(tmp_path, name, batch, *start, options=["--resume", first, *options])
        for part, value in whole.items():
            if part != "method.queue.keys" or name == "again":  # alone, images of a batch come in another order
                torch.testing.assert_close(resumed[part], value, rtol=1e-5, atol=1e-5, msg=f"{name}: {part}")


@pytest.mark.parametrize("launcher", ["slurm", "mpi"])
def test_other_launchers_find_their_place_without_a_gpu(launcher, tmp_path, monkeypatch):
    from mmengine.config import Config
    from moco_mmengine.launch import prepare_distributed

    names = {"slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"), "mpi": ("RANK", "SIZE", "LOCAL_RANK")}[
        launcher
    ]
    for name, value in zip(names, ("0", "1", "0"), strict=True):
        monkeypatch.setenv(name if launcher == "slurm" else f"OMPI_COMM_WORLD_{name}", value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = Config({"find_unused_parameters": True})
    try:
        prepare_distributed(launcher, cfg)
        assert (dist.get_backend(), dist.get_world_size()) == ("gloo", 1)
    finally:
        dist.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
            os.environ.pop(name)
    assert cfg.model_wrapper_cfg.device_ids is None
    assert cfg.model_wrapper_cfg.find_unused_parameters
    if launcher == "slurm":
        monkeypatch.setenv("SLURM_NNODES", "2")
        with pytest.raises(RuntimeError, match="MASTER_ADDR"):
            prepare_distributed(launcher, cfg)
