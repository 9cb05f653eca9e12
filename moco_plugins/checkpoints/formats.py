"""What a format of checkpoints is, and all that are known: the built-in ones and those of plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..hooks import manager as plugins
from .dialects import BUILT_IN, Dialect

if TYPE_CHECKING:
    from .reading import Content
    from .weights import Weights


@dataclass(frozen=True)
class Format:
    """A format of checkpoints, offered by the hook ``moco_checkpoint_formats``.

    Args:
        title: what it is, in a few words.
        read: gives the :class:`Weights` in a file's :class:`Content`, or None where the file is of another format. It
            parts the tensors (``content.take(prefix)``) and need not rename them: :func:`moco_plugins.checkpoints.load`
            turns names of known libraries and heads into ours and tells the architecture.
        loose: it knows its files by little; asked only where no other format takes a file.
        write: ``write(weights, path, part)`` makes a file or folder at ``path`` that does not exist yet; ``part`` is
            "backbone", "encoder" or "all". Raises ValueError where the weights have no place in it.
        parts: those that ``write`` takes; the first is the default.
        dialects: how the format's library calls the parts of known networks.
        harmless: classes and functions (or pairs of one and its full name) that its pickles need besides tensors and that
            run nothing of the file; see ``torch.serialization.add_safe_globals``.
    """

    title: str
    read: Callable[[Content], Weights | None] | None = None
    loose: bool = False
    write: Callable[[Weights, Path, str], None] | None = None
    parts: tuple[str, ...] = ("backbone",)
    dialects: tuple[Dialect, ...] = ()
    harmless: Callable[[], list[Any]] = field(default=list)


def known_formats() -> Mapping[str, Format]:
    """All formats: name -> format."""
    return {name: kind for name, (_, kind) in plugins.checkpoint_formats().items()}


def dialects() -> tuple[Dialect, ...]:
    """All dialects: the built-in ones and those that formats bring."""
    return (*BUILT_IN, *(dialect for kind in known_formats().values() for dialect in kind.dialects))
