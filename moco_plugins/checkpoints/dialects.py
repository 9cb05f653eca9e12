"""How libraries call the parts of the same network, and translations between them that lose nothing.

A ResNet is spoken of as torchvision does (timm does the same), a vision transformer as timm does; a :class:`Dialect` holds
what another library calls each part. Adapters bring their framework's with their formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

_SLOT = re.compile(r"\\\{(\w)(?:\\?([+-])(\d+))?\\\}|\*")


@dataclass(frozen=True)
class Dialect:
    """One library's names for one family of networks.

    Args:
        name: of the library.
        family: "resnet" or "vit".
        rules: (our name, theirs); ``{i}`` stands for a number, ``{i-1}`` for one less than ours, ``*`` for the last word.
        joined: (our name, their names) of what is one tensor with us and several there, one after the other along rows.
        strips: prefixes that their whole models put before these names.
        drops: their names that have no part in the features, such as a pooler that is trained later.
    """

    name: str
    family: str
    rules: tuple[tuple[str, str], ...]
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
    strips: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    _cache: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def ours(self, name: str) -> tuple[str, int] | None:
        """Our name for theirs, and which piece of it theirs is; None where it is not of this dialect."""
        for pattern, template, piece in self._to_ours:
            if found := pattern.fullmatch(name):
                return _fill(template, found), piece
        return None

    def theirs(self, name: str) -> list[str] | None:
        """Their name, or names, for ours."""
        for pattern, templates in self._to_theirs:
            if found := pattern.fullmatch(name):
                return [_fill(template, found) for template in templates]
        return None

    def speaks(self, names: Iterable[str]) -> bool:
        """Whether all of these names are of this dialect, and some are of numbered blocks."""
        found = [(self.ours(name), name) for name in names]
        known = all(ours is not None or name.startswith(self.drops) for ours, name in found)
        return known and any(ours is not None and ours[0].startswith(("layer", "blocks")) for ours, _ in found)

    def to_ours(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Translate a state dict that is wholly of this dialect, but for what it drops."""
        pieces: dict[str, dict[int, Tensor]] = {}
        for name, value in state.items():
            found = self.ours(name)
            if found is not None:
                pieces.setdefault(found[0], {})[found[1]] = value
        return {
            name: parts[0] if len(parts) == 1 else torch.cat([parts[i] for i in sorted(parts)])
            for name, parts in pieces.items()
        }

    def to_theirs(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Translate from our names.

        Raises:
            ValueError: they have no name for one of ours.
        """
        translated: dict[str, Tensor] = {}
        for name, value in state.items():
            names = self.theirs(name)
            if names is None:
                raise ValueError(f"{name} has no name in {self.name}'s {self.family}, so it cannot be written there")
            for theirs, piece in zip(names, value.chunk(len(names)) if len(names) > 1 else [value], strict=True):
                translated[theirs] = piece.clone() if len(names) > 1 else piece
        return translated

    @cached_property
    def _to_ours(self) -> list[tuple[re.Pattern[str], str, int]]:
        single = [(_pattern(theirs), ours, 0) for ours, theirs in self.rules]
        return single + [(_pattern(name), ours, i) for ours, names in self.joined for i, name in enumerate(names)]

    @cached_property
    def _to_theirs(self) -> list[tuple[re.Pattern[str], list[str]]]:
        joined = [(_pattern(ours), list(names)) for ours, names in self.joined]
        return joined + [(_pattern(ours), [theirs]) for ours, theirs in self.rules]


def _pattern(template: str) -> re.Pattern[str]:
    def slot(found: re.Match[str]) -> str:
        if found[0] == "*":
            return "(?P<rest>[^.]+)"
        sign, count = found[2] or "+", found[3] or "0"
        return f"(?P<{found[1]}{'p' if sign == '+' else 'm'}{count}>\\d+)"

    return re.compile(_SLOT.sub(slot, re.escape(template).replace("\\*", "*")))


def _fill(template: str, found: re.Match[str]) -> str:
    numbers: dict[str, int] = {}
    for name, value in found.groupdict().items():
        if name != "rest":
            offset = int(name[2:]) * (1 if name[1] == "p" else -1)
            numbers[name[0]] = int(value) - offset

    def slot(match: re.Match[str]) -> str:
        if match[0] == "*":
            return found["rest"]
        return str(numbers[match[1]] + int((match[2] or "+") + (match[3] or "0")))

    return re.sub(r"\{(\w)(?:([+-])(\d+))?\}|\*", slot, template)


_RESNET = ("conv1.*", "bn1.*", "layer{i}.{j}.conv{k}.*", "layer{i}.{j}.bn{k}.*", "layer{i}.{j}.downsample.{k}.*")
_VIT = (
    "cls_token",
    "pos_embed",
    "patch_embed.proj.*",
    "blocks.{i}.norm1.*",
    "blocks.{i}.attn.proj.*",
    "blocks.{i}.norm2.*",
    "blocks.{i}.mlp.fc1.*",
    "blocks.{i}.mlp.fc2.*",
    "norm.*",
)
_QKV = "blocks.{i}.attn.qkv.*"


def vit_rules(*theirs: str, qkv: str | None = None) -> tuple[tuple[str, str], ...]:
    """The rules of a vision transformer: their names for class token, position embeddings, patch projection, first norm,
    attention's output, second norm, the two layers of the MLP, last norm; and for attention's input where it is one tensor.
    """
    return (*zip(_VIT, theirs, strict=True), *(((_QKV, qkv),) if qkv else ()))


TORCHVISION_RESNET = Dialect(
    "torchvision", "resnet", tuple((name, name) for name in _RESNET), strips=("_feature_blocks.",)
)
TIMM_VIT = Dialect("timm", "vit", vit_rules(*_VIT, qkv=_QKV))
TORCHVISION_VIT = Dialect(
    "torchvision",
    "vit",
    (
        *vit_rules(
            "class_token",
            "encoder.pos_embedding",
            "conv_proj.*",
            "encoder.layers.encoder_layer_{i}.ln_1.*",
            "encoder.layers.encoder_layer_{i}.self_attention.out_proj.*",
            "encoder.layers.encoder_layer_{i}.ln_2.*",
            "encoder.layers.encoder_layer_{i}.mlp.0.*",
            "encoder.layers.encoder_layer_{i}.mlp.3.*",
            "encoder.ln.*",
            qkv="encoder.layers.encoder_layer_{i}.self_attention.in_proj_*",
        ),
        # Files of torchvision 0.11 and older.
        ("blocks.{i}.mlp.fc1.*", "encoder.layers.encoder_layer_{i}.mlp.linear_1.*"),
        ("blocks.{i}.mlp.fc2.*", "encoder.layers.encoder_layer_{i}.mlp.linear_2.*"),
    ),
)
#: ``nn.Sequential(*list(resnet.children())[:-1])``, as many recipes cut a ResNet, lightly's among them.
CHILDREN_RESNET = Dialect(
    "a Sequential of torchvision's layers",
    "resnet",
    (
        ("conv1.*", "0.*"),
        ("bn1.*", "1.*"),
        ("layer{i}.{j}.conv{k}.*", "{i+3}.{j}.conv{k}.*"),
        ("layer{i}.{j}.bn{k}.*", "{i+3}.{j}.bn{k}.*"),
        ("layer{i}.{j}.downsample.{k}.*", "{i+3}.{j}.downsample.{k}.*"),
    ),
)
BUILT_IN = (TORCHVISION_RESNET, TIMM_VIT, TORCHVISION_VIT, CHILDREN_RESNET)
