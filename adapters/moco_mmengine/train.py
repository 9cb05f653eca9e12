"""``moco-plugins train CONFIG``: what OpenMMLab's ``tools/train.py`` does, and resuming under torch >= 2.6."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmengine.config import Config, DictAction
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from .checkpoints import explain_refusal, trusting
from .launch import prepare_distributed


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="moco-plugins train", description="Train an MMEngine config.")
    p.add_argument("config", help="config file (.py, .yaml or .json)")
    p.add_argument("--work-dir", help="where logs and checkpoints go; default: work_dirs/NAME OF CONFIG")
    p.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="PATH",
        help="continue from this checkpoint; without PATH from the newest one in the work dir, if there is one",
    )
    p.add_argument("--trust-checkpoint", action="store_true", help="load a checkpoint even if it may run code")
    p.add_argument("--amp", action="store_true", help="mixed precision: float16 on GPUs, bfloat16 on CPUs")
    p.add_argument("--no-validate", action="store_true", help="leave out validation")
    p.add_argument("--auto-scale-lr", action="store_true", help="scale the learning rate by the batch size")
    p.add_argument(
        "--cfg-options",
        nargs="+",
        action=DictAction,
        metavar="KEY=VALUE",
        help="settings: optim_wrapper.optimizer.lr=0.1",
    )
    p.add_argument(
        "--launcher", choices=("none", "pytorch", "slurm", "mpi"), default="none", help="who started the processes"
    )
    p.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)
    return p


def main(argv: Sequence[str]) -> int:
    """Train; return the exit status."""
    arguments = parser().parse_args(list(argv))
    cfg = load_config(arguments)
    prepare_distributed(arguments.launcher, cfg)
    runner_type = RUNNERS.build if "runner_type" in cfg else Runner.from_cfg
    runner = runner_type(cfg)
    with trusting(arguments.trust_checkpoint):
        try:
            runner.train()
        except Exception as error:
            refusal = explain_refusal(error)
            if refusal is None:
                raise
            raise SystemExit(f"moco-plugins train: {refusal}") from error
    return 0


def load_config(arguments: argparse.Namespace) -> Config:
    """Read the config and change it as the command line says."""
    path = Path(arguments.config)
    if not path.is_file():
        raise SystemExit(f"moco-plugins train: config {path} does not exist (looked in {path.resolve().parent})")
    cfg = Config.fromfile(str(path))
    if arguments.cfg_options:
        cfg.merge_from_dict(arguments.cfg_options)
    cfg.launcher = arguments.launcher
    cfg.work_dir = arguments.work_dir or cfg.get("work_dir") or str(Path("work_dirs") / path.stem)
    if arguments.resume == "auto":
        cfg.resume, cfg.load_from = True, None
    elif arguments.resume:
        if not Path(arguments.resume).is_file():
            raise SystemExit(f"moco-plugins train: --resume {arguments.resume}: no such file")
        cfg.resume, cfg.load_from = True, arguments.resume
    if arguments.no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    if arguments.amp:
        _use_amp(cfg)
    if arguments.auto_scale_lr:
        if "base_batch_size" not in cfg.get("auto_scale_lr", {}):
            raise SystemExit("moco-plugins train: --auto-scale-lr needs auto_scale_lr = dict(base_batch_size=...)")
        cfg.auto_scale_lr.enable = True
    for name in ("train_dataloader", "val_dataloader", "test_dataloader"):
        # Configs inherited from another package ("mmpretrain::...") carry its scope; here MMEngine would pass it on.
        collate = (cfg.get(name) or {}).get("collate_fn")
        if isinstance(collate, dict):
            collate.pop("_scope_", None)
    _add_hook(cfg)
    return cfg


def _use_amp(cfg: Any) -> None:
    import torch

    wrapper = cfg.optim_wrapper
    kind = wrapper.get("type", "OptimWrapper")
    if getattr(kind, "__name__", kind) == "OptimWrapper":  # one that is chosen already stays
        wrapper["type"] = "AmpOptimWrapper" if torch.cuda.is_available() else "moco_plugins.AutocastOptimWrapper"
        if torch.cuda.is_available():
            wrapper.setdefault("loss_scale", "dynamic")


def _add_hook(cfg: Any) -> None:
    hooks = list(cfg.get("custom_hooks") or [])
    kinds = [hook.get("type") if isinstance(hook, dict) else type(hook) for hook in hooks]
    if not any(str(getattr(kind, "__name__", kind)).endswith("MethodHook") for kind in kinds):
        cfg.custom_hooks = [*hooks, {"type": "moco_plugins.MethodHook"}]
