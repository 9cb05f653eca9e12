"""The short page of one pretraining: is it well, what has it learnt, and where are the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...files import write_atomically
from ..measures import by_precision, named
from . import findings
from .classes import classes_section
from .health import in_words
from .html import code, definitions, document, header, listing, section, text
from .page import RESULTS, kept_pictures, results_table
from .table import number, percent, rows, with_values
from .training_figures import draw_training

#: What baselines are called where one training is looked at.
BEFORE = "before training"
_COLUMNS = ("kNN %", "linear %", "balanced %", "AUROC", "10 % labels", "1 % labels", "rank")


def write_training_page(content: Mapping[str, Any], weights: str, loading: str, out: Path) -> Path:
    """Write ``report.html`` of the one run in ``content``; ``loading`` is the code that loads the file ``weights``."""
    (record,) = content["runs"]
    labelled = bool(content["data"]["labelled"])
    pictures = draw_training(record, out / "figures")
    kept = kept_pictures(out / "figures", labelled and not by_precision(content))
    title = f"{record['label']} on {content['data'].get('learnt_from') or content['data']['name']}"
    parts = [
        header("moco-plugins pretrain", title, summary(content, record)),
        listing("warnings", "Read with care", [*content["data"]["notes"], *findings.damaged(content)]),
        f"<section><h2>The weights</h2><p>{text(weights)} holds the backbone; weights.json beside it says how it was made."
        f"</p>{code(loading)}</section>",
        listing("verdicts", "Is this normal?", [f"{part[0].upper()}{part[1:]}." for part in health(record)]),
        _accuracy(content) if labelled else "",
        section("How it learnt", pictures),
        section("What it looks at", [one for one in kept if not one.path.name.startswith("projection")], "wide"),
        section("What it makes of it", [one for one in kept if one.path.name.startswith("projection")], "wide"),
        classes_section(rows(content), out / "figures") if labelled else "",
        f"<section><h2>How it was made</h2>{definitions(_settings(content, record))}"
        f"<p class=note>{text(', '.join(f'{k} = {v}' for k, v in record['options'].items()))}</p>"
        f"<p class=note>{text(', '.join(f'{k} {v}' for k, v in content['versions'].items()))}. "
        f"{text(content['hardware'])}. {text(content['date'])}.</p></section>",
        f"<section><h2>Run it again</h2>{code(chr(10).join(content['commands']))}</section>"
        if content["commands"]
        else "",
    ]
    write_atomically(out / "report.html", document(title, parts))
    return out / "report.html"


def health(record: Mapping[str, Any]) -> list[str]:
    """What the last look at the training says, in words; the drift is that of the whole training."""
    last = dict((record.get("curve") or [{}])[-1])
    drift = (record.get("metrics") or {}).get("key_drift")
    return in_words({**last, "metric_key_drift": drift} if drift is not None else last)


def summary(content: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """What was done, and what came out of it."""
    data, shared = content["data"], content["settings"]
    said = [
        f"{shared['backbone']} has learnt from {number(data['pretraining_images'])} images without labels, "
        f"{record['epochs']:g} epochs in {number(record['seconds'])} s "
        f"({number(record['images_per_second'] or 0)} images/s)."
    ]
    table = rows(content)
    after = next((row for row in table if not row.baseline), None)
    before = next((row for row in table if row.baseline), None)
    if after is not None and after.knn:
        was = f" It was {percent(before.knn)} % before training." if before is not None and before.knn else ""
        said.append(
            f"{named('kNN accuracy', by_precision(content))} on {number(data['test_images'])} test images: "
            f"{percent(after.knn)} %.{was}"
        )
    return said


def _accuracy(content: Mapping[str, Any]) -> str:
    table = [replace(row, label=BEFORE) if row.baseline else row for row in rows(content)]
    cells = with_values({name: cell for name, cell in RESULTS.items() if name in _COLUMNS}, table)
    heading, precision = "Accuracy", by_precision(content)
    note = "Accuracy of the frozen backbone on test images that it has not learnt from. Rank: directions in use."
    return (
        f"<section class=results><h2>{named(heading, precision)}</h2>{results_table(table, cells)}"
        f"<p class=note>{named(note, precision)}</p></section>"
    )


def _settings(content: Mapping[str, Any], record: Mapping[str, Any]) -> Sequence[tuple[str, object]]:
    shown = [(name, value) for name, value in findings.settings(content) if not name.startswith("kNN")]
    start = content["settings"].get("init")
    return [*shown, ("seed", record["seed"]), *([("started from", start)] if start else [])]
