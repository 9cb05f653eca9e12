"""The report: one HTML file that can be mailed, with all figures inside; it is written from results.json and the PNGs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...files import write_atomically
from ...hooks import manager as plugins
from ..measures import by_precision, named
from ..results import FILE, Results, write_results
from . import figures, findings
from .classes import classes_section
from .comparison import differences, summary
from .html import code, definitions, document, header, listing, section, text
from .merge import merged
from .picture import Picture
from .table import Row, each, mean, number, percent, rows, shortened, with_values
from .tests_table import tests_table
from .tuning import tuning


def gather(folders: Sequence[Path]) -> dict[str, Any]:
    """The results of a folder, or of several merged.

    Raises:
        SettingsError: a folder has no results, or they cannot be merged.
    """
    return merged([Results(folder).content for folder in folders], _names(folders))


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' last names, or where these are not enough, the folders as they were given."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def write_report(
    folders: Sequence[Path],
    out: Path,
    metric: str = "knn_top1",
    reference: str | None = None,
    content: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``report.html`` and the figures into ``out``, from one folder of results or from several merged.

    Merged results are written as well, unless ``out`` has results of its own. ``content`` is what :func:`gather` gives for
    the folders, where that is at hand.

    Raises:
        SettingsError: a folder has no results, or they cannot be merged.
    """
    if content is None:
        content = gather(folders)
    out.mkdir(parents=True, exist_ok=True)
    if "merged" in content and (not (out / FILE).exists() or "merged" in Results(out).content):
        write_results(out, content)
    labelled = content.get("data", {}).get("labelled", True) and not by_precision(content)
    pictures = figures.draw_all(content, out / "figures", metric)
    if by_precision(content):
        pictures = [replace(one, title=named(one.title, True), caption=named(one.caption, True)) for one in pictures]
    kept: dict[str, Picture] = {}
    for folder, name in zip(folders, _names(folders), strict=True):
        for picture in kept_pictures(folder / "figures", labelled):
            same = kept.setdefault(picture.title, picture)
            if same.path.read_bytes() != picture.path.read_bytes():
                title = f"{picture.title} ({name})"
                kept[title] = replace(picture, title=title)
    path = out / "report.html"
    classes = classes_section(rows(content, metric), out / "figures")
    write_atomically(path, page(content, pictures, list(kept.values()), metric, reference, classes))
    return path


def kept_pictures(folder: Path, labelled: bool = True) -> list[Picture]:
    """The pictures that were drawn while the comparison ran; ``labelled``: they know of classes."""
    found = []
    for path in sorted(folder.glob("views*.png")):
        kind = path.stem.removeprefix("views").removeprefix("-")
        caption = "What the methods learn from: each image, and the two views that must be recognised as one."
        title = f"View pairs: {kind}" if kind else "View pairs"
        found.append(Picture(path, title, caption, "Training images with their two random views"))
    for path in sorted(folder.glob("neighbours-*.png")):
        label = path.stem.removeprefix("neighbours-")
        framed = "; framed where the class differs" if labelled else ""
        caption = f"Top row: some images. Below: their nearest training images by the features{framed}."
        found.append(Picture(path, f"Nearest neighbours: {label}", caption, f"Nearest neighbours by {label}"))
    for path in sorted(folder.glob("projection-*.png")):
        label = path.stem.removeprefix("projection-")
        shown = "up to 500 test images in two dimensions (t-SNE), coloured by class; no label was used."
        if not labelled:
            shown = "some images in two dimensions (t-SNE): what lies together looks alike to the backbone."
        caption = f"The features of {shown}"
        found.append(Picture(path, f"Map of the features: {label}", caption, f"t-SNE map of the features of {label}"))
    return found


def page(
    content: Mapping[str, Any],
    pictures: Sequence[Picture],
    kept: Sequence[Picture],
    metric: str,
    reference: str | None,
    classes: str = "",
) -> str:
    """The whole page."""
    whole = rows(content, metric)
    table = shortened(whole)
    title = findings.title(content)
    wide = [picture for picture in kept if picture.path.name.startswith(("views", "neighbours"))]
    maps = [picture for picture in kept if picture not in wide]
    verdicts = findings.verdicts(content, metric, reference)
    parts = [
        header(
            f"moco-plugins {'evaluate' if findings.judged_only(content) else 'bench'}",
            title,
            findings.sentences(content, metric, reference),
        ),
        listing("warnings", "Read with care", findings.warnings(content, metric)),
        f"<section class=results><h2>Results</h2>{results_table(table, with_values(RESULTS, table))}"
        f"<p class=note>{text(findings.table_note(content))}</p></section>",
        listing("verdicts", "What the numbers can tell", verdicts),
        tests_table(differences(whole, metric, reference)),
        tuning(content),
        _cost(table),
        section("Side by side" if findings.judged_only(content) else "How they learn", pictures),
        section("What they look at", wide, "wide"),
        section("What they make of it", maps),
        classes,
        *(f"<section><h2>{text(name)}</h2>{body}</section>" for name, body in plugins.report_sections(content)),
        f"<section><h2>What was compared, and how</h2>{_settings(content)}</section>",
        _commands(content),
    ]
    return document(title, parts)


#: Heading of the table -> what stands there.
RESULTS: dict[str, Callable[[Row], str]] = {
    "seeds": lambda row: str(row.seeds) + (f" ({row.failed} failed)" if row.failed else ""),
    "kNN %": lambda row: _with_interval(row, "knn_top1"),
    "linear %": lambda row: _with_interval(row, "linear_top1"),
    "balanced %": lambda row: percent(row.values("linear_balanced")),
    "AUROC": lambda row: _decimals(row, "linear_auroc", 3),
    "10 % labels": lambda row: percent(row.values("linear_top1_10pct")),
    "1 % labels": lambda row: percent(row.values("linear_top1_1pct")),
    "fine-tuned": lambda row: percent(row.values("finetune_top1")),
    "alignment": lambda row: _decimals(row, "alignment"),
    "uniformity": lambda row: _decimals(row, "uniformity"),
    "rank": lambda row: _decimals(row, "effective_rank", 0),
}
_COST: dict[str, Callable[[Row], str]] = {
    "epochs": lambda row: number(mean(row.values("epochs"))),
    "images": lambda row: number(row.images_seen),
    "forward": lambda row: number(row.forward),
    "backward": lambda row: number(row.backward),
    "train s": lambda row: number(row.seconds),
    "evaluate s": lambda row: number(mean(row.values("evaluation_seconds"))),
    "images/s": lambda row: number(row.images_per_second),
    "peak MiB": lambda row: number(row.memory),
    "parameters": lambda row: number(mean(row.values("parameters"))),
}
_RUN: dict[str, Callable[[Row], str]] = {
    "seed": lambda row: str(row.records[0]["seed"]),
    "kNN %": lambda row: percent(row.knn),
    "linear %": lambda row: percent(row.linear),
    **{name: cell for name, cell in _COST.items() if name != "parameters"},
}


def _with_interval(row: Row, metric: str) -> str:
    values = summary(row, metric)
    if values.count < 2:
        return percent(row.values(metric))
    interval = f"{100 * values.low:.1f}–{100 * values.high:.1f}"
    return f"{percent(row.values(metric))} <small>({interval})</small>"


def _decimals(row: Row, name: str, digits: int = 2) -> str:
    values = row.values(name)
    return f"{mean(values):.{digits}f}".replace("-", "−") if values else "–"


def results_table(table: Sequence[Row], cells: Mapping[str, Callable[[Row], str]]) -> str:
    """A table of rows: the name of each, and its cells."""
    engines = len({row.engine for row in table if row.engine}) > 1
    lines = []
    for row in table:
        shown = "".join(f"<td>{cell(row)}</td>" for cell in cells.values())
        kind = " class=baseline" if row.baseline else ""
        engine = f"<td>{text(row.engine)}</td>" if engines else ""
        lines.append(f"<tr{kind}><th scope=row>{text(row.label)}</th>{engine}{shown}</tr>")
    names = ["method", *(["engine"] if engines else []), *cells]
    heads = "".join(f"<th scope=col>{name}</th>" for name in names)
    return f"<div class=scroll tabindex=0><table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _cost(table: Sequence[Row]) -> str:
    runs = [row for row in table if not row.baseline and row.seeds]
    if not any(row.values("seconds") for row in runs):
        return ""
    whole = (
        "" if all(row.seeds < 2 for row in runs)
        else "<details><summary>Every run</summary>"
        f"{results_table([one for row in runs for one in each(row)], with_values(_RUN, runs))}</details>"
    )  # fmt: skip
    note = f"<p class=note>{text(findings.COST_NOTE)}</p>"
    return f"<section class=cost><h2>What it cost</h2>{results_table(runs, _COST)}{note}{whole}</section>"


def _settings(content: Mapping[str, Any]) -> str:
    options = "".join(f"<li><b>{text(name)}</b> {text(value)}</li>" for name, value in findings.options(content))
    heading = "The files" if findings.judged_only(content) else "Options of the methods"
    versions = ", ".join(f"{name} {version}" for name, version in content.get("versions", {}).items())
    how = "".join(f"<p>{text(paragraph)}</p>" for paragraph in findings.how(content))
    return (
        f"{how}{definitions(findings.settings(content))}<h3>{heading}</h3><ul class=options>{options}</ul>"
        f"<p class=note>{text(versions)}. {text(content.get('hardware', ''))}. {text(content.get('date', ''))}.</p>"
    )


def _commands(content: Mapping[str, Any]) -> str:
    commands = content.get("commands", [])
    if not commands:
        return ""
    return f"<section><h2>Run it again</h2>{code(chr(10).join(commands))}</section>"
