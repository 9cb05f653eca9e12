"""What is measured: accuracy, or where images may have several labels the mean average precision, under its own names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def score(values: Mapping[str, Any], name: str) -> Any:
    """The value called ``name``, such as knn_top1, or the mean average precision that was measured in its place; None."""
    value = values.get(name)
    return values.get(name.replace("top1", "map")) if value is None else value


def by_precision(content: Mapping[str, Any]) -> bool:
    """Whether results are mean average precisions."""
    return content.get("data", {}).get("measure") == "map"


def named(text: str, precision: bool) -> str:
    """A sentence or a heading that speaks of accuracy, for what was measured."""
    if not precision:
        return text
    for old, new in (("kNN %", "kNN mAP %"), ("linear %", "linear mAP %"), ("fine-tuned", "fine-tuned mAP"),
                     ("kNN accuracy", "kNN mAP"), ("linear-probe accuracy", "linear-probe mAP"),
                     ("Accuracy", "Mean average precision"), ("accuracy", "mean average precision")):  # fmt: skip
        text = text.replace(old, new)
    return text
