"""The plugin ``transformers``: Hugging Face's libraries. Imports none of them until one is used."""

from __future__ import annotations

from collections.abc import Sequence

from moco_plugins import hookimpl
from moco_plugins.hooks.engine import Adapter, TrainingJob, TrainingOutcome

from .frameworks import INSTALL, huggingface


def _train(job: TrainingJob) -> TrainingOutcome:
    huggingface("accelerate")
    from .engine import run_job

    return run_job(job)


@hookimpl
def moco_adapters() -> Sequence[Adapter]:
    """Accelerate."""
    return [
        Adapter(
            name="accelerate",
            framework="transformers",
            install=INSTALL,
            distributions=("transformers", "accelerate"),
            engine=_train,
        )
    ]
