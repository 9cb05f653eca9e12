"""The report: one HTML file that can be mailed, with all figures inside; it is written from results.json and the PNGs."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...hooks import manager as plugins
from ..results import FILE, Results, write_results
from . import figures, findings
from .comparison import summary
from .merge import merged
from .picture import Picture
from .table import Row, each, mean, number, percent, rows, shortened

_OPTION = re.compile(r"(--[a-z][a-z-]*)")
_STYLE = (Path(__file__).parent / "report.css").read_text


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
    pictures = figures.draw_all(content, out / "figures", metric)
    kept: dict[str, Picture] = {}
    for folder, name in zip(folders, _names(folders), strict=True):
        for picture in kept_pictures(folder / "figures"):
            same = kept.setdefault(picture.title, picture)
            if same.path.read_bytes() != picture.path.read_bytes():
                title = f"{picture.title} ({name})"
                kept[title] = replace(picture, title=title)
    path = out / "report.html"
    path.write_text(page(content, pictures, list(kept.values()), metric, reference), encoding="utf-8")
    return path


def kept_pictures(folder: Path) -> list[Picture]:
    """The pictures that were drawn while the comparison ran."""
    found = []
    for path in sorted(folder.glob("views*.png")):
        kind = path.stem.removeprefix("views").removeprefix("-")
        caption = "What the methods learn from: each image, and the two views that must be recognised as one."
        title = f"View pairs: {kind}" if kind else "View pairs"
        found.append(Picture(path, title, caption, "Training images with their two random views"))
    for path in sorted(folder.glob("neighbours-*.png")):
        label = path.stem.removeprefix("neighbours-")
        caption = (
            "Top row: test images. Below: the nearest training images by the features; framed where the class differs."
        )
        found.append(Picture(path, f"Nearest neighbours: {label}", caption, f"Nearest neighbours by {label}"))
    for path in sorted(folder.glob("projection-*.png")):
        label = path.stem.removeprefix("projection-")
        caption = "The features of 500 test images in two dimensions (t-SNE), coloured by class; no label was used."
        found.append(Picture(path, f"Map of the features: {label}", caption, f"t-SNE map of the features of {label}"))
    return found


def page(
    content: Mapping[str, Any], pictures: Sequence[Picture], kept: Sequence[Picture], metric: str, reference: str | None
) -> str:
    """The whole page."""
    table = shortened(rows(content, metric))
    title = findings.title(content)
    wide = [picture for picture in kept if picture.path.name.startswith(("views", "neighbours"))]
    maps = [picture for picture in kept if picture not in wide]
    verdicts = findings.verdicts(content, metric, reference)
    parts = [
        f"<header><p class=kicker>moco-plugins bench</p><h1>{_text(title)}</h1>",
        "".join(f"<p class=lead>{_text(sentence)}</p>" for sentence in findings.sentences(content, metric, reference)),
        "</header>",
        _list("warnings", "Read with care", findings.warnings(content, metric)),
        f"<section class=results><h2>Results</h2>{_table(table, _RESULTS)}"
        f"<p class=note>{_text(findings.table_note(content))}</p></section>",
        _list("verdicts", "What the numbers can tell", verdicts),
        _cost(table),
        _section("How they learn", pictures),
        _section("What they look at", wide, "wide"),
        _section("What they make of it", maps),
        *(f"<section><h2>{_text(name)}</h2>{body}</section>" for name, body in plugins.report_sections(content)),
        f"<section><h2>What was compared, and how</h2>{_settings(content)}</section>",
        _commands(content),
    ]
    style = _STYLE(encoding="utf-8")
    return (
        f"<!doctype html>\n<html lang=en>\n<head><meta charset=utf-8><title>{_text(title)}</title>\n"
        f'<meta name=viewport content="width=device-width, initial-scale=1">\n<style>\n{style}</style></head>\n'
        f"<body><main>\n{chr(10).join(part for part in parts if part)}\n</main></body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value)).replace(" %", "\u00a0%")


def _section(title: str, pictures: Sequence[Picture], kind: str = "") -> str:
    if not pictures:
        return ""
    return f'<section><h2>{title}</h2><div class="figures {kind}">{"".join(map(_figure, pictures))}</div></section>'


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode()
    return (
        f"<figure><h3>{_text(picture.title)}</h3>"
        f'<img alt="{_text(picture.alt)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{_text(picture.caption)}</figcaption></figure>"
    )


def _list(kind: str, title: str, found: Sequence[str]) -> str:
    if not found:
        return ""
    marked = (_OPTION.sub(r"<code>\1</code>", _text(sentence)) for sentence in found)
    items = "".join(f"<li>{sentence}</li>" for sentence in marked)
    return f"<section class={kind}><h2>{title}</h2><ul>{items}</ul></section>"


#: Heading of the table -> what stands there.
_RESULTS: dict[str, Callable[[Row], str]] = {
    "seeds": lambda row: str(row.seeds) + (f" ({row.failed} failed)" if row.failed else ""),
    "kNN %": lambda row: _with_interval(row, "knn_top1"),
    "linear %": lambda row: _with_interval(row, "linear_top1"),
    "10 % labels": lambda row: percent(row.values("linear_top1_10pct")),
    "1 % labels": lambda row: percent(row.values("linear_top1_1pct")),
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


def _table(table: Sequence[Row], cells: Mapping[str, Callable[[Row], str]]) -> str:
    engines = len({row.engine for row in table if row.engine}) > 1
    lines = []
    for row in table:
        shown = "".join(f"<td>{cell(row)}</td>" for cell in cells.values())
        kind = " class=baseline" if row.baseline else ""
        engine = f"<td>{_text(row.engine)}</td>" if engines else ""
        lines.append(f"<tr{kind}><th scope=row>{_text(row.label)}</th>{engine}{shown}</tr>")
    names = ["method", *(["engine"] if engines else []), *cells]
    heads = "".join(f"<th scope=col>{name}</th>" for name in names)
    return f"<div class=scroll tabindex=0><table><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _cost(table: Sequence[Row]) -> str:
    runs = [row for row in table if not row.baseline and row.seeds]
    if not runs:
        return ""
    whole = (
        "" if all(row.seeds < 2 for row in runs)
        else f"<details><summary>Every run</summary>{_table([one for row in runs for one in each(row)], _RUN)}</details>"
    )  # fmt: skip
    note = f"<p class=note>{_text(findings.COST_NOTE)}</p>"
    return f"<section class=cost><h2>What it cost</h2>{_table(runs, _COST)}{note}{whole}</section>"


def _settings(content: Mapping[str, Any]) -> str:
    items = "".join(
        f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in findings.settings(content)
    )
    options = "".join(f"<li><b>{_text(name)}</b> {_text(value)}</li>" for name, value in findings.options(content))
    versions = ", ".join(f"{name} {version}" for name, version in content.get("versions", {}).items())
    how = "".join(f"<p>{_text(paragraph)}</p>" for paragraph in findings.how(content))
    return (
        f"{how}<dl>{items}</dl><h3>Options of the methods</h3><ul class=options>{options}</ul>"
        f"<p class=note>{_text(versions)}. {_text(content.get('hardware', ''))}. {_text(content.get('date', ''))}.</p>"
    )


def _commands(content: Mapping[str, Any]) -> str:
    commands = content.get("commands", [])
    if not commands:
        return ""
    return f"<section><h2>Run it again</h2><pre><code>{_text(chr(10).join(commands))}</code></pre></section>"
