"""Several processes: groups without CUDA, which MMEngine 0.10 cannot make, and processes for a job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
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


def join_processes(devices: int, nodes: int, device: torch.device) -> str:
    """Make sure that ``devices`` x ``nodes`` processes take part in this program; return MMEngine's name of the launcher.

    Under torchrun they are there. Otherwise this process becomes the first one and starts the same command once more for
    each further device of this machine.

    Raises:
        ValueError: torchrun started another number of processes, or several nodes are asked for without it.
    """
    world = devices * nodes
    if world == 1:
        return "none"
    if "RANK" not in os.environ:
        if nodes > 1:
            raise ValueError(f"num_nodes={nodes}: start the program on each node, with torchrun --nnodes={nodes}")
        _start_others(devices)
    if int(os.environ["WORLD_SIZE"]) != world:
        raise ValueError(
            f"devices={devices}, num_nodes={nodes}: torchrun has started {os.environ['WORLD_SIZE']} processes; "
            f"use --nproc_per_node={devices} --nnodes={nodes}"
        )
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return "pytorch"


def _start_others(devices: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(devices), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for rank in range(1, devices):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment)
