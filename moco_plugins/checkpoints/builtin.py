"""The formats that need no framework."""

from __future__ import annotations

from collections.abc import Mapping

from . import authors, libraries, own
from .formats import Format

FORMATS: Mapping[str, Format] = {**own.FORMATS, **authors.FORMATS, **libraries.FORMATS}
