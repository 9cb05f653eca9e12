"""``load``: read a checkpoint of any known format, and say what is in it."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from . import architectures, reading
from .formats import known_formats
from .heads import in_sequence
from .names import in_library_names
from .weights import Weights


def load(path: str | PathLike[str] | Mapping[str, Any] | Weights, trust: bool = False) -> Weights:
    """Read a checkpoint of any known format.

    Known are those of this package and of all loaded plugins (hook ``moco_checkpoint_formats``); the table in README lists
    them. Nothing in the file is executed.

    Args:
        path: a file, a folder of Hugging Face's ``save_pretrained``, or what ``torch.load`` has read. Weights are returned
            as they are.
        trust: unpickle anything, code included; for files of known origin that need it.

    Returns:
        :class:`Weights`, which tell format, architecture, parts, what is missing and what has no place.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, needs more trust, or is of no known format; the message has one sentence on it.
    """
    if isinstance(path, Weights):
        return path
    if isinstance(path, Mapping):
        return recognise(reading.Content(path), "checkpoint")
    harmless = [thing for kind in known_formats().values() for thing in kind.harmless()]
    return recognise(reading.read(Path(path), trust, harmless), str(path))


def recognise(content: reading.Content, source: str) -> Weights:
    """Find the format of what was read, and read the weights."""
    formats = known_formats()
    if not content.state and not any(isinstance(value, Mapping) for value in content.raw.values()):
        raise ValueError(f"{source}: there are no tensors in it")
    for loose in (False, True):
        claims: list[tuple[str, Weights, reading.Content]] = []
        for name, kind in formats.items():
            own = dataclasses.replace(content)  # each keeps count of what it has taken
            if kind.read is not None and kind.loose == loose and (found := kind.read(own)) is not None:
                claims.append((name, found, own))
        if len(claims) > 1:
            raise ValueError(
                f"{source}: the formats {' and '.join(name for name, *_ in claims)} both take it for theirs; keep one "
                "plugin out with MOCO_PLUGINS_BLOCK"
            )
        if claims:
            return _settled(*claims[0], source)
    first = ", ".join(list(content.state)[:3]) or ", ".join(map(str, list(content.raw)[:3]))
    raise ValueError(f"{source}: it is of no known format (it has {first}); known are {', '.join(sorted(formats))}")


def _settled(name: str, found: Weights, content: reading.Content, source: str) -> Weights:
    """Names of libraries and heads into ours; architecture, classifier, what is left."""
    left = [*found.left, *content.left]
    sides: dict[str, Any] = {}
    for part in ("backbone", "key_backbone"):
        sides[part], dropped = _backbone(getattr(found, part))
        left += dropped
    notes = list(found.notes)
    for part in ("projector", "predictor", "key_projector"):
        state: dict[str, Tensor] = getattr(found, part)
        places = in_sequence(state)
        if state and places is None:
            notes.append(f"the {part.replace('_', ' ')} is of a kind of its own ({', '.join(list(state)[:2])})")
        sides[part] = {ours: state[theirs] for ours, theirs in places.items()} if places else state
    if not sides["backbone"]:
        raise ValueError(f"{source}: there is no backbone in these {name} weights")
    _same_kind(sides["backbone"], sides["key_backbone"], source, "backbone")
    _same_kind(sides["projector"], sides["key_projector"], source, "projector")
    if sides["projector"] and bool(sides["key_backbone"]) != bool(sides["key_projector"]):
        raise ValueError(f"{source}: its key encoder is not whole: of backbone and projector there is only one")
    network = _architecture(found.architecture, sides["backbone"])
    if network is not None and network.options:
        own = ", ".join(f"{option}={value}" for option, value in network.options.items())
        notes.append(f"its {network.name} is built with {own}, which its library's is not by itself")
    if network is not None and network.name.endswith("-cifar"):
        notes.append(
            "its stem is that of small images: a library's ResNet takes it once model.conv1 is 3 x 3 (stride 1) and "
            "model.maxpool an nn.Identity()"
        )
    if name == "state-dict" and network is not None:
        name = "timm" if network.name.startswith("timm/") else "torchvision"
    return dataclasses.replace(found, format=name, left=tuple(left), notes=tuple(notes), architecture=network, **sides)


def _architecture(
    told: architectures.Architecture | None, backbone: Mapping[str, Tensor]
) -> architectures.Architecture | None:
    """What the file tells of its network, completed by what its tensors tell."""
    guessed = architectures.guess(backbone) if told is None or not told.name or "vit" in told.name else None
    if told is None:
        return guessed
    if not told.name:  # a reader knows an option only
        return guessed and dataclasses.replace(guessed, options={**guessed.options, **told.options})
    if guessed is None or not isinstance(told.image_size, int):
        return told
    return dataclasses.replace(told, image_size=guessed.image_size)  # position embeddings know it


def _backbone(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    bare, classifier = architectures.without_classifier(state)
    named, dropped = in_library_names(bare)
    named, inner = architectures.without_classifier(named)
    return named, [*classifier, *inner, *dropped]


def _same_kind(query: Mapping[str, Tensor], key: Mapping[str, Tensor], source: str, part: str) -> None:
    """A key encoder is a second query encoder: half of one would stay random and count as trained."""
    if key and query.keys() != key.keys():
        odd = sorted(query.keys() ^ key.keys())
        hint = difflib.get_close_matches(odd[0], key, 1)
        raise ValueError(
            f"{source}: the {part}s of query and key encoder differ in {len(odd)} names, such as {odd[0]}"
            + (f" (the other has {hint[0]})" if hint else "")
        )
