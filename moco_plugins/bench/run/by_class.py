"""What a linear probe says of each class, and of all whatever their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ... import evaluation

#: Classes that are told one by one, and classes whose confusion is kept.
MOST, PICTURED = 1000, 50


def by_class(probe: evaluation.Probe, names: Sequence[str]) -> dict[str, Any]:
    """Balanced accuracy, macro AUROC, and ``by_class``: images, recall and precision of each class.

    Where images have several labels: the AUROC, and the average precision of each class instead of recall and precision.
    ``confusion``, where the classes are few, counts images: [truth][told]. Test images of classes that the training part
    has not are wrong in accuracy, and left out here.
    """
    if probe.labels.ndim == 2:
        return _of_several(probe, names)
    known = probe.labels >= 0
    if len(probe.classes) < 2 or len(torch.unique(probe.labels[known])) < 2:
        return {}
    logits, labels = probe.logits[known], probe.labels[known]
    counts = evaluation.confusion(logits.argmax(1), labels, len(probe.classes))
    rows = []
    for place, number in enumerate(probe.classes.tolist()[:MOST]):
        right, images, told = (int(n) for n in (counts[place, place], counts[place].sum(), counts[:, place].sum()))
        rows.append(
            {
                "class": _name(number, names),
                "images": images,
                "recall": right / images if images else None,
                "precision": right / told if told else None,
            }
        )
    return {
        "linear_balanced": evaluation.balanced_accuracy(counts),
        "linear_auroc": evaluation.macro_auroc(logits, labels),
        "by_class": rows,
        "confusion": counts.tolist() if len(rows) <= PICTURED else None,
    }


def _of_several(probe: evaluation.Probe, names: Sequence[str]) -> dict[str, Any]:
    precisions = evaluation.average_precisions(probe.logits, probe.labels)
    rows = [
        {
            "class": _name(number, names),
            "images": int(probe.labels[:, number].sum()),
            "average_precision": precisions[number],
        }
        for number in probe.classes.tolist()[:MOST]
    ]
    both = bool((probe.labels.any(0) & ~probe.labels.all(0)).any())
    auroc = {"linear_auroc": evaluation.macro_auroc(probe.logits, probe.labels)} if both else {}
    return {**auroc, "by_class": rows, "confusion": None}


def _name(number: int, names: Sequence[str]) -> str:
    return names[number] if 0 <= number < len(names) else str(number)
