"""Settings filled in from the data and checked before anything runs."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import torch

from ...hooks import manager as plugins
from .ablations import ABLATIONS
from .budget import Budget
from .data import Data
from .errors import MissingExtraError, SettingsError
from .presets import preset_for
from .recipes import with_recipe
from .runs import check_options, variations
from .settings import DEFAULT_METHODS, Settings

_LEAST: dict[str, float] = {
    "epochs": 1,
    "seeds": 1,
    "first_seed": 0,
    "batch_size": 2,
    "knn_k": 1,
    "devices": 1,
    "num_nodes": 1,
    "workers": 0,
    "image_size": 8,
    "weight_decay": 0,
    "checkpoint_minutes": 0,
}

#: How many of its numbers an engine computes in half precision.
PRECISIONS = ("32", "bf16-mixed", "16-mixed")

#: What launchers tell each process; without one nobody would come from the other nodes.
_LAUNCHED = ("WORLD_SIZE", "SLURM_NTASKS", "NODE_RANK", "GROUP_RANK")


def complete(settings: Settings, data: Data) -> Settings:
    """Fill in what is not given, and check everything that can be checked without training.

    Raises:
        UnknownNameError, SettingsError: a name or value that does not exist or cannot work.
    """
    preset = preset_for(data.channels, data.image_size, len(data.pretrain))
    settings = _with_budget(settings, preset.epochs)
    if settings.ablation is not None:
        settings = _with_ablation(settings)
    settings = with_recipe(settings, preset)
    views = settings.views or preset.views
    for method in settings.methods:
        plugins.method_factory(method)
    adapter = plugins.adapter(settings.engine)
    if adapter.engine is None:
        raise SettingsError(f"engine={settings.engine!r}: this adapter does not train by itself; choose another engine")
    if not _installed(adapter.framework):
        here = [name for name, (_, other) in plugins.adapters().items() if other.engine and _installed(other.framework)]
        raise MissingExtraError(
            f"engine={settings.engine!r} needs {adapter.framework}, which is not installed: {adapter.install}"
            + (f"; or --engine {here[0]}, which is there" if here else "")
        )
    settings = replace(
        settings,
        backbone=settings.backbone or preset.backbone,
        views=views,
        view_options=settings.view_options or (dict(preset.view_options) if views == preset.views else {}),
        image_size=data.image_size,
    )
    _check(settings, data)
    check_options(settings)
    own = {  # what the user wants for all methods goes before what the preset has for one
        method: {name: value for name, value in options.items() if name not in settings.options}
        for method, options in preset.method_options.items()
        if method in settings.methods
    }
    return replace(
        settings,
        options={**preset.options, **settings.options},
        method_options={
            method: {**own.get(method, {}), **settings.method_options.get(method, {})}
            for method in (*own, *settings.method_options)
        },
    )


def _installed(framework: str) -> bool:
    return importlib.util.find_spec(framework) is not None


def _with_budget(settings: Settings, epochs: int) -> Settings:
    """Settings with epochs where all methods get the same number, or a budget where each gets its own."""
    if settings.budget is None:
        return replace(settings, epochs=settings.epochs if settings.epochs is not None else epochs)
    if settings.epochs is not None:
        raise SettingsError(f"--epochs {settings.epochs} and --budget {settings.budget}: give one of them")
    budget = Budget.parse(settings.budget)
    if budget.kind == "epochs":
        return replace(settings, epochs=max(1, round(budget.amount)), budget=None)
    return settings


def _with_ablation(settings: Settings) -> Settings:
    if settings.ablation not in ABLATIONS:
        raise SettingsError(f"--ablation {settings.ablation!r}: there are {', '.join(ABLATIONS)}")
    if settings.sweep:
        raise SettingsError(f"--ablation {settings.ablation} and --sweep: give one of them")
    if settings.methods != DEFAULT_METHODS:
        raise SettingsError(f"--ablation {settings.ablation} brings its own methods; leave out --methods")
    methods = dict.fromkeys(variation.method for variation in ABLATIONS[settings.ablation].variations)
    return replace(settings, methods=tuple(methods))


def _check(settings: Settings, data: Data) -> None:
    for name, least in _LEAST.items():
        value = getattr(settings, name)
        if value is not None and (min(value) if isinstance(value, tuple) else value) < least:
            raise SettingsError(f"--{name.replace('_', '-')} {value}: it must be at least {least}")
    if not settings.learning_rate > 0:  # type: ignore[operator]
        raise SettingsError(f"--learning-rate {settings.learning_rate}: it must be greater than 0")
    if settings.precision not in PRECISIONS:
        raise SettingsError(f"--precision {settings.precision}: there are {', '.join(PRECISIONS)}")
    _check_placement(settings)
    if settings.batch_size > len(data.pretrain):  # type: ignore[operator]
        raise SettingsError(
            f"--batch-size {settings.batch_size}: the training set of {data.name} has only {len(data.pretrain)} images"
        )
    largest = max((line.recipe.get("batch_size", 0) for line in variations(settings)), default=0)
    if largest > len(data.pretrain):
        raise SettingsError(
            f"--ablation {settings.ablation}: it has a batch of {largest}, and {data.name} only {len(data.pretrain)} images"
        )
    if settings.tune and (settings.sweep or settings.ablation is not None):
        raise SettingsError("--tune chooses values and --sweep or --ablation tries them all: give one of them")
    if len(set(settings.methods)) < len(settings.methods):
        raise SettingsError(f"--methods {' '.join(settings.methods)}: a method is named twice")
    if len(settings.sweep) > 1:
        raise SettingsError(f"--sweep: one option at a time, not {' and '.join(settings.sweep)}")
    labels = [variation.label for variation in variations(settings)]
    if len(set(labels)) < len(labels):
        raise SettingsError(f"--sweep: a value is given twice ({', '.join(labels)})")


def _check_placement(settings: Settings) -> None:
    kind, _, index = settings.device.partition(":")
    there = {"auto": True, "cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if kind not in there or (index and not index.isdigit()):
        raise SettingsError(f"--device {settings.device}: there are auto, cpu, cuda, cuda:N and mps")
    if not there[kind]:
        raise SettingsError(f"--device {settings.device}: torch finds none here; --device cpu works everywhere")
    if index and int(index) >= torch.cuda.device_count():
        raise SettingsError(f"--device {settings.device}: torch finds {torch.cuda.device_count()}, counted from 0")
    if settings.num_nodes > 1 and not any(name in os.environ for name in _LAUNCHED):
        raise SettingsError(
            f"--nodes {settings.num_nodes}: nobody would start the other nodes. Start the same command on each of them with "
            f"srun, or with torchrun --nnodes {settings.num_nodes} --nproc-per-node {settings.devices} -m moco_plugins bench"
        )
