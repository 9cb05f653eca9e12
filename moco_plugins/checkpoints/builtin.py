"""The formats that need no framework."""

from __future__ import annotations

from collections.abc import Mapping

from . import authors, detectron2, huggingface, libraries, onnx, own, solo_learn, stable_pretraining, vissl
from .formats import Format

_FAMILIES = (own, authors, libraries, solo_learn, vissl, stable_pretraining, huggingface, detectron2, onnx)
FORMATS: Mapping[str, Format] = {name: kind for family in _FAMILIES for name, kind in family.FORMATS.items()}
