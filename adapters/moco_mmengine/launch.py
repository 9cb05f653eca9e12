"""Several processes: groups without CUDA, which MMEngine 0.10 cannot make."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

#: launcher -> what its environment calls (rank, world size, local rank)
_NAMES = {
    "pytorch": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
}


def prepare_distributed(launcher: str, cfg: Any) -> None:
    """Where ``launcher`` is not "none" and there is no GPU: make a gloo group before the Runner is built, and a DDP without
    device numbers. (MMEngine sets a CUDA device in any case.) With GPUs, or a group already made, MMEngine does it.

    Raises:
        RuntimeError: the process was not started by that launcher.
    """
    if launcher == "none":
        return
    names = _NAMES[launcher]
    missing = [name for name in names if name not in os.environ]
    if missing:
        start = "torchrun --nproc_per_node=2 -m moco_plugins train CONFIG --launcher pytorch"
        raise RuntimeError(
            f"--launcher {launcher}: {', '.join(missing)} not set, so {launcher} did not start this process"
            + (f"; start it with: {start}" if launcher == "pytorch" else "")
        )
    if torch.cuda.is_available():
        return
    if "MASTER_ADDR" not in os.environ and int(os.environ.get("SLURM_NNODES", "1")) > 1:
        raise RuntimeError(
            f"--launcher {launcher}: several nodes and no MASTER_ADDR; set it to the first node's address"
        )
    for common, own in zip(_NAMES["pytorch"], names, strict=True):
        os.environ[common] = os.environ[own]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    wrapper = dict(cfg.get("model_wrapper_cfg") or {"type": "MMDistributedDataParallel", "broadcast_buffers": False})
    wrapper.setdefault("find_unused_parameters", bool(cfg.get("find_unused_parameters", False)))
    wrapper["device_ids"] = None
    cfg.model_wrapper_cfg = wrapper
