"""Parts of pages: escaped text, sections, figures, lists, and the page around them, one file with all inside it."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path

from .picture import Picture

_OPTION = re.compile(r"(--[a-z][a-z-]*)")
_STYLE = (Path(__file__).parent / "report.css").read_text


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page of its parts; empty ones are left out."""
    style = _STYLE(encoding="utf-8")
    return (
        f"<!doctype html>\n<html lang=en>\n<head><meta charset=utf-8><title>{text(title)}</title>\n"
        f'<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f'<meta name=color-scheme content="light dark">\n<style>\n{style}</style></head>\n'
        f"<body><main>\n{chr(10).join(part for part in parts if part)}\n</main></body></html>\n"
    )


def header(kicker: str, title: str, sentences: Sequence[str]) -> str:
    """The head of a page."""
    leads = "".join(f"<p class=lead>{text(sentence)}</p>" for sentence in sentences)
    return f"<header><p class=kicker>{text(kicker)}</p><h1>{text(title)}</h1>{leads}</header>"


def text(value: object) -> str:
    """Escaped text, in which a percent sign stays with its number."""
    return html.escape(str(value)).replace(" %", "\u00a0%")


#: Figures of a section that are seen at once; the others are a click away.
AT_ONCE = 8


def section(title: str, pictures: Sequence[Picture], kind: str = "") -> str:
    """A section of figures; empty without."""
    if not pictures:
        return ""
    drawn = [_figure(picture, drawn=kind != "wide") for picture in pictures]
    more = (
        f'<details><summary>{len(drawn) - AT_ONCE} more</summary><div class="figures {kind}">'
        f"{''.join(drawn[AT_ONCE:])}</div></details>"
        if len(drawn) > AT_ONCE
        else ""
    )
    return f'<section><h2>{title}</h2><div class="figures {kind}">{"".join(drawn[:AT_ONCE])}</div>{more}</section>'


def _figure(picture: Picture, drawn: bool) -> str:
    """A figure; ``drawn``: of lines and letters, which the page turns to light on dark where the reader wants that."""
    data = base64.b64encode(picture.path.read_bytes()).decode()
    kind = " class=drawn" if drawn else ""
    return (
        f"<figure><h3>{text(picture.title)}</h3>"
        f'<img{kind} alt="{text(picture.alt)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{text(picture.caption)}</figcaption></figure>"
    )


def listing(kind: str, title: str, found: Sequence[str]) -> str:
    """A section of sentences, in which options look like code; empty without."""
    if not found:
        return ""
    marked = (_OPTION.sub(r"<code>\1</code>", text(sentence)) for sentence in found)
    items = "".join(f"<li>{sentence}</li>" for sentence in marked)
    return f"<section class={kind}><h2>{title}</h2><ul>{items}</ul></section>"


def definitions(pairs: Sequence[tuple[str, object]]) -> str:
    """Names and values."""
    return f"<dl>{''.join(f'<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>' for name, value in pairs)}</dl>"


def code(lines: str) -> str:
    """A block of code."""
    return f"<pre><code>{text(lines)}</code></pre>"
