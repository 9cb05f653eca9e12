"""What follows from the results as a whole: intervals, paired differences, whether the engines agree, equal budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..measures import score
from .statistics import Difference, Summary, holm, paired, summarise
from .table import Row, mean, rows

#: Losses of two engines are called equal up to this difference (float32, CPU).
SAME_LOSS = 1e-5


def by_seed(row: Row, metric: str) -> dict[int, float]:
    """Seed -> value."""
    return {int(record["seed"]): record[metric] for record in row.records if record.get(metric) is not None}


def summary(row: Row, metric: str) -> Summary:
    """Mean, deviation and interval of a row."""
    return summarise(list(by_seed(row, metric).values()))


def reference_row(table: Sequence[Row], reference: str | None) -> Row | None:
    """The row that others are compared to: the one that is asked for, else MoCo v2, else the first.

    Raises:
        ValueError: there is no row of that name.
    """
    runs = [row for row in table if not row.baseline]
    if reference is not None:
        found = [row for row in runs if row.label == reference]
        if not found:
            raise ValueError(f"--reference {reference!r}: the results have {', '.join(row.label for row in runs)}")
        return found[0]
    return next((row for row in runs if row.label == "moco-v2"), runs[0] if runs else None)


def differences(table: Sequence[Row], metric: str, reference: str | None) -> list[Difference]:
    """All runs against the reference, seed by seed, within one engine; corrected for how many there are."""
    base = reference_row(table, reference)
    if base is None:
        return []
    others = [row for row in table if not row.baseline and row is not base and row.engine == base.engine]
    found = [paired(row.label, by_seed(row, metric), base.label, by_seed(base, metric)) for row in others]
    return holm([difference for difference in found if difference is not None])


def engines_agree(results: Mapping[str, Any]) -> list[str]:
    """A sentence for each label that engines have trained from the same seeds; seeds of which it is the same share it."""
    runs: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for record in results["runs"]:
        if record.get("status") == "finished":
            runs.setdefault((record["label"], record["seed"]), []).append(record)
    said: dict[tuple[str, str], list[int]] = {}
    for (label, seed), (first, *others) in runs.items():
        alike = [other for other in others if _alike(first, other)]
        apart = [other for other in others if other not in alike]
        texts = [_agreement(first, *alike)] if alike else []
        for text in (*texts, *(_disagreement(first, other) for other in apart)):
            said.setdefault((label, text), []).append(seed)
    return [f"{label}, {seeds_of(seeds)}: {text}" for (label, text), seeds in said.items()]


def seeds_of(seeds: Sequence[int]) -> str:
    """Some seeds in words: "seed 0", "seeds 0, 1 and 4"."""
    numbers = [str(seed) for seed in sorted(set(seeds))]
    return f"seed {numbers[0]}" if len(numbers) == 1 else f"seeds {join(numbers)}"


def join(names: Sequence[str]) -> str:
    """Names in a sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def named(some: Sequence[Row], table: Sequence[Row]) -> list[str]:
    """The labels of some rows of a table, each once; with its engine only where another engine's row is not among them."""
    whole = {row.label: [other for other in table if other.label == row.label] for row in some}
    apart = {label: any(row not in some for row in rows) for label, rows in whole.items()}
    return list(dict.fromkeys(f"{row.label} ({row.engine})" if apart[row.label] else row.label for row in some))


def _apart(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[float]:
    """How much the losses of two runs differ, step by step."""
    return [abs(a[1] - b[1]) for a, b in zip(first["losses"], second["losses"], strict=True)]


def _alike(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    if len(first["losses"]) != len(second["losses"]) or score(first, "knn_top1") != score(second, "knn_top1"):
        return False
    return max(_apart(first, second), default=0.0) <= SAME_LOSS


def _agreement(first: Mapping[str, Any], *alike: Mapping[str, Any]) -> str:
    engines = join([record["engine"] for record in (first, *alike)])
    worst = max((difference for other in alike for difference in _apart(first, other)), default=0.0)
    return f"{engines} give {_how(first, worst)} and the same kNN {_kind(first)}."


def _disagreement(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    engines = f"{first['engine']} and {second['engine']}"
    if len(first["losses"]) != len(second["losses"]):
        return f"{engines} made different numbers of steps."
    apart = _apart(first, second)
    worst = max(apart, default=0.0)
    if worst > SAME_LOSS:
        at = next(int(loss[0]) for loss, by in zip(first["losses"], apart, strict=True) if by > SAME_LOSS)
        return f"{engines} part at step {at} of {_steps(first)}; the losses differ by up to {worst:.1e}."
    knn = f"kNN {_kind(first, True)} {score(first, 'knn_top1')} and {score(second, 'knn_top1')}"
    return f"{engines} give {_how(first, worst)} and {knn}."


def _kind(run: Mapping[str, Any], both: bool = False) -> str:
    return "mAP" if "knn_map" in run else "accuracies" if both else "accuracy"


def _how(run: Mapping[str, Any], worst: float) -> str:
    if worst == 0:
        return f"exactly the same loss at each of {_steps(run)} steps"
    return f"the same loss at each of {_steps(run)} steps (largest difference {worst:.0e})"


def _steps(run: Mapping[str, Any]) -> int:
    return int(run["losses"][-1][0]) if run["losses"] else 0


def unequal_budgets(results: Mapping[str, Any]) -> str | None:
    """A sentence if the runs did not have the same cost by the measure that was asked for, else None."""
    budget = (results.get("settings") or {}).get("budget")
    kind = str(budget).partition("=")[0] if budget else "epochs"
    values = {
        row.label: mean([_spent(record, kind) for record in row.records]) for row in rows(results) if not row.baseline
    }
    values = {label: value for label, value in values.items() if value == value and value > 0}
    if len(values) < 2 or max(values.values()) <= 1.05 * min(values.values()):
        return None
    most, least = max(values, key=lambda k: values[k]), min(values, key=lambda k: values[k])
    return (
        f"The runs did not cost the same: {most} had {values[most] / values[least]:.2f} times the {kind} of {least} "
        f"({_amount(values[most])} against {_amount(values[least])})."
    )


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _spent(record: Mapping[str, Any], kind: str) -> float:
    if kind == "passes":
        return float(record.get("forward_images") or 0) + float(record.get("backward_images") or 0)
    name = {"epochs": "epochs", "images": "images_seen", "seconds": "seconds"}[kind]
    return float(record.get(name) or 0)


def cost_note(results: Mapping[str, Any]) -> str | None:
    """A sentence on what equal epochs hide: some methods do more work for each image."""
    if (results.get("settings") or {}).get("budget"):
        return None
    work = {
        row.label: (row.forward + row.backward) / row.images_seen
        for row in rows(results)
        if not row.baseline and row.images_seen and row.forward == row.forward
    }
    if len(work) < 2 or max(work.values()) < 1.2 * min(work.values()):
        return None
    most, least = max(work, key=lambda k: work[k]), min(work, key=lambda k: work[k])
    return (
        f"Equal epochs are not equal work: {most} makes {work[most]:.3g} encoder passes for each image, {least} "
        f"{work[least]:.3g}. --budget passes=N or seconds=S compares at equal cost."
    )
