"""Ablations that come with the harness: what the MoCo paper claims, one command each (``--ablation NAME``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variation:
    """One line of an ablation: how it is called, the method, its options."""

    label: str
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Settings that it has of its own, such as its batch size.
    recipe: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ablation:
    """A question, and the runs that answer it."""

    question: str
    variations: Sequence[Variation]
    #: The option that changes, where the answer is a curve.
    option: str | None = None


def _sweep(question: str, option: str, values: Sequence[Any], method: str = "moco-v2") -> Ablation:
    return Ablation(question, [Variation(f"{method} {option}={v}", method, {option: v}) for v in values], option)


ABLATIONS: dict[str, Ablation] = {
    "momentum": _sweep(
        "How slowly must the key encoder move? (table of section 4.1: without momentum the training fails)",
        "momentum",
        (0.0, 0.9, 0.99, 0.996, 0.999),
    ),
    "queue": _sweep(
        "What does a larger dictionary bring? (figure 3: accuracy against the number of negatives)",
        "queue_size",
        (64, 256, 1024, 4096),
    ),
    "mechanisms": Ablation(
        "Which dictionary? (figure 2: end-to-end, memory bank, MoCo; same head, loss, temperature)",
        [
            Variation("end-to-end", "end-to-end"),
            Variation("memory-bank", "memory-bank"),
            Variation("moco-v2", "moco-v2"),
        ],
    ),
    "negatives": Ablation(
        "Negatives from the queue, from the batch, or both; weighed, mixed, without the image's own, or told by labels?",
        [
            Variation("queue only", "moco-v2", {"in_batch_negatives": False}),
            Variation("batch only", "moco-v2", {"in_batch_negatives": True, "queue_size": 0}),
            Variation("queue and batch", "moco-v2", {"in_batch_negatives": True}),
            Variation("without own images", "moco-v2", {"queue_options": {"columns": {"id": "long"}}}),
            *(Variation(loss, "moco-v2", {"loss": loss}) for loss in ("decoupled", "debiased", "hard", "ressl")),
            Variation(
                "mochi", "moco-v2", {"loss": "mochi", "loss_options": {"hardest": 256, "mixed": 64, "with_query": 16}}
            ),
            Variation("supcon (labels)", "moco-v2", {"loss": "supcon"}),
        ],
    ),
    "batch": Ablation(
        "Does the queue free the dictionary from the batch? (sections 3.2 and 4.1; the same number of images for all)",
        [
            Variation(f"{method} batch_size={size}", method, {}, {"batch_size": size})
            for method in ("moco-v2", "simclr", "end-to-end")
            for size in (16, 32, 64, 256)
        ],
        "batch_size",
    ),
}
