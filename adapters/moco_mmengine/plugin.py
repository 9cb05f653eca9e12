"""The plugin of this adapter (entry point ``mmengine``). Light to import: MMEngine itself only inside functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moco_plugins.checkpoints import Format
from moco_plugins.hooks.engine import Adapter, TrainingJob, TrainingOutcome
from moco_plugins.hooks.specs import hookimpl

from .baselines import BASELINES
from .formats import FORMATS

_INSTALL = 'pip install "moco-plugins[mmengine]"'


def _need_mmengine() -> None:
    try:
        import mmengine  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "mmengine":
            raise
        raise ModuleNotFoundError(f"MMEngine is not installed: {_INSTALL}", name="mmengine") from error


def activate() -> None:
    """Register our types with MMEngine."""
    _need_mmengine()
    from .registration import register_types

    register_types()


def train_job(job: TrainingJob) -> TrainingOutcome:
    """Train a job with MMEngine's Runner."""
    activate()
    from .job import run_job

    return run_job(job)


def train_config(argv: Sequence[str]) -> int:
    """``moco-plugins train CONFIG``."""
    activate()
    from .train import main

    return main(argv)


@hookimpl
def moco_adapters() -> Sequence[Adapter]:
    """Offer MMEngine."""
    return [
        Adapter(
            name="mmengine",
            framework="mmengine",
            install=_INSTALL,
            activate=activate,
            distributions=("mmengine",),
            engine=train_job,
            train_config=train_config,
            baselines=BASELINES,
        )
    ]


@hookimpl
def moco_checkpoint_formats() -> Mapping[str, Format]:
    """OpenMMLab's."""
    return FORMATS
