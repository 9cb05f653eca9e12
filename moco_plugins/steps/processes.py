"""The processes of a job: those that torchrun has started, or this one and copies of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import torch
import torch.distributed as dist


def join_processes(devices: int, nodes: int, device: torch.device) -> bool:
    """Make sure that ``devices`` x ``nodes`` processes take part in this program, in one group; False: it is one alone.

    Under torchrun, or where there is a group, they are there. Otherwise this process becomes the first one and starts the
    same command once more for each further device of this machine. What torchrun says in the
    environment (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE) is there afterwards.

    Args:
        devices: processes on each machine, one device each.
        nodes: machines.
        device: its type decides what the group talks by: NCCL for CUDA, else gloo.

    Raises:
        ValueError: another number of processes is there, or several nodes are asked for without torchrun.
    """
    world = devices * nodes
    if world == 1:
        return False
    if dist.is_initialized():
        os.environ.setdefault("RANK", str(dist.get_rank()))
        os.environ.setdefault("WORLD_SIZE", str(dist.get_world_size()))
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank() % devices))
    elif "RANK" not in os.environ:
        if nodes > 1:
            raise ValueError(f"num_nodes={nodes}: start the program on each node, with torchrun --nnodes={nodes}")
        _start_others(devices)
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(devices))
    if int(os.environ["WORLD_SIZE"]) != world:
        raise ValueError(
            f"devices={devices}, num_nodes={nodes}: torchrun has started {os.environ['WORLD_SIZE']} processes; "
            f"use --nproc_per_node={devices} --nnodes={nodes}"
        )
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return True


def _start_others(devices: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(devices), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for rank in range(1, devices):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment)
