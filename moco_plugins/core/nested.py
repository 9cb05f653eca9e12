"""Views of any kind: a tensor, or a nested structure (mappings, lists, tuples) of tensors, all with N rows.

Images (N, C, H, W), clips (N, C, T, H, W), waveforms (N, L), tables (N, F), point clouds (N, P, 3), a dict of input_ids and
attention_mask (N, L): whatever the backbone takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

#: A tensor or a nested structure of tensors; what it may be cannot be written as a type.
View = Any


def tensors(view: View, path: str = "") -> list[tuple[str, Tensor]]:
    """Return the tensors of a view with their places in it, such as ``['input_ids']``.

    Raises:
        TypeError: something in it is no tensor.
    """
    if isinstance(view, Tensor):
        return [(path, view)]
    if isinstance(view, Mapping):
        return [found for name, part in view.items() for found in tensors(part, f"{path}[{name!r}]")]
    if isinstance(view, (list, tuple)):
        return [found for i, part in enumerate(view) for found in tensors(part, f"{path}[{i}]")]
    raise TypeError(f"{type(view).__name__}{' at ' + path if path else ''}")


def map_tensors(view: View, change: Callable[[Tensor], Tensor]) -> View:
    """Return a view of the same structure with each tensor changed."""
    if isinstance(view, Tensor):
        return change(view)
    if isinstance(view, Mapping):
        changed = {name: map_tensors(part, change) for name, part in view.items()}
        return changed if type(view) is dict else _again(view, changed)
    parts = [map_tensors(part, change) for part in view]
    if isinstance(view, tuple) and hasattr(view, "_fields"):
        return type(view)(*parts)
    return type(view)(parts)


def _again(view: Any, changed: dict[Any, Any]) -> Any:
    try:
        return type(view)(changed)  # OrderedDict, BatchEncoding
    except TypeError:
        return changed


def rows(view: View) -> int:
    """N."""
    return int(first(view).shape[0])


def first(view: View) -> Tensor:
    """The first tensor of a view: it tells the device and N."""
    return view if isinstance(view, Tensor) else tensors(view)[0][1]


def take(view: View, order: Tensor | slice) -> View:
    """Some rows of a view."""
    return map_tensors(view, lambda tensor: tensor[order])
