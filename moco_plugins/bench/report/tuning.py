"""What was tried before the runs, and what each method has picked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .html import text


def tuning(content: Mapping[str, Any]) -> str:
    """The section of trials; empty where nothing was tuned."""
    told = content.get("tuning")
    if not told:
        return ""
    lines = []
    for trial in told["trials"]:
        picked = trial["values"] == told["picks"].get(trial["method"])
        score = f"{100 * trial['knn_top1']:.1f}" if trial["knn_top1"] is not None else text(trial["status"])
        cells = (words(trial["values"]), str(trial["seed"]), score, "picked" if picked else "")
        lines.append(
            f"<tr><th scope=row>{text(trial['method'])}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        )
    picks = "".join(f"<li><b>{text(method)}</b> {words(values)}</li>" for method, values in told["picks"].items())
    heads = "".join(f"<th scope=col>{head}</th>" for head in ("method", "values", "seed", "kNN %", ""))
    each = len(told["trials"]) // max(1, len(told["picks"]))
    note = (
        f"{each} trials for each method, a third as long as a run, judged by kNN on {told['images']} training images that "
        "the trials did not learn from. Test images were not looked at."
    )
    return (
        f"<section class=tuning><h2>What each method has picked</h2><ul class=options>{picks}</ul><p class=note>{text(note)}"
        f"</p><details><summary>Every trial</summary><div class=scroll tabindex=0><table><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody></table></div></details></section>"
    )


def words(values: Mapping[str, Any]) -> str:
    """Names and values in a line."""
    return text(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items()) or "nothing to choose")
