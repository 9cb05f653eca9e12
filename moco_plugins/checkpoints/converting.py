"""``convert``: a checkpoint of any format that is read into any format that is written."""

from __future__ import annotations

import shutil
from os import PathLike
from pathlib import Path

from ..files import replacing
from ..hooks import manager as plugins
from .formats import Format, known_formats
from .loading import load
from .weights import Weights


def writers() -> dict[str, Format]:
    """The formats that are written: name -> format."""
    return {name: kind for name, kind in known_formats().items() if kind.write is not None}


def convert(
    source: str | PathLike[str] | Weights,
    out: str | PathLike[str],
    to: str,
    part: str | None = None,
    arch: str | None = None,
    force: bool = False,
    trust: bool = False,
) -> Weights:
    """Read ``source`` and write it to ``out`` in the format ``to``; return what was read.

    Args:
        source: a file or folder of any known format, or weights.
        out: the file or folder to write. It is there whole or not at all.
        to: a format that is written: torchvision, timm, mmengine, detectron2, huggingface, safetensors, onnx, moco, ...
        part: "backbone", "encoder" (with the projection head) or "all" (key encoder, predictor, queue); None: the format's
            habit, and of what the file has.
        arch: the network, where it is not recognised; as :func:`moco_plugins.backbones.build_backbone` takes it.
        force: replace what is at ``out``.
        trust: see :func:`moco_plugins.checkpoints.load`.

    Raises:
        FileExistsError: there is something at ``out``, and ``force`` is not given.
        ValueError, LookupError: ``source`` cannot be read or has no place in the format; the message says why.
    """
    kind, path = plugins.checkpoint_format(to), Path(out)
    if kind.write is None:
        raise ValueError(f"to={to!r} is read and not written; written are {', '.join(sorted(writers()))}")
    if part is not None and part not in kind.parts:
        raise ValueError(f"part={part!r}: {to} takes {' or '.join(kind.parts)}")
    if (path.exists() or path.is_symlink()) and not force:
        raise FileExistsError(f"{path} exists already; --force (force=True) replaces it")
    weights = load(source, trust)
    if arch is not None:
        weights = weights.with_architecture(arch)
    part = part or kind.parts[0]
    if part == "encoder" and not weights.projector:
        raise ValueError(f"part='encoder': these {weights.format} weights have no projection head")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        _clear(partial)  # what a run that was killed has left
        try:
            kind.write(weights, partial, part)
        except BaseException:
            _clear(partial)
            raise
        if path.is_dir():
            shutil.rmtree(path)  # os.replace does not replace a folder that has something in it
    return weights


def _clear(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
