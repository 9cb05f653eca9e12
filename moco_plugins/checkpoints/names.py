"""Backbones under the names of the library they are of, whoever saved them and inside whatever."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from .dialects import TIMM_VIT, TORCHVISION_RESNET, TORCHVISION_VIT, Dialect
from .formats import dialects

#: What people wrap networks in: ``0.`` of this project's version 0.1.0, ``backbone.`` and ``model.`` of everybody.
_WRAPPERS = ("0.", "backbone.", "model.", "module.", "trunk.", "encoder.", "net.")


def unwrapped(names: Iterable[str]) -> str:
    """The prefix that all names share because a network was wrapped."""
    names, prefix = list(names), ""
    while names:
        if any(dialect.speaks(name.removeprefix(prefix) for name in names) for dialect in dialects()):
            return prefix
        strips = (*_WRAPPERS, *(strip for dialect in dialects() for strip in dialect.strips))
        found = next((s for s in strips if all(name.startswith(prefix + s) for name in names)), None)
        if found is None or not any("." in name.removeprefix(prefix + found) for name in names):  # a lone layer
            return prefix
        prefix += found
    return ""


def dialect_of(names: Iterable[str]) -> Dialect | None:
    """The dialect that all of these names are of."""
    names = list(names)
    return next((dialect for dialect in dialects() if dialect.speaks(names)), None)


def in_library_names(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return a backbone's tensors under the names of torchvision or timm, and the names that have no part in it.

    A ResNet gets torchvision's names (timm's are the same), a vision transformer keeps torchvision's and else gets timm's;
    names of other networks stay, without what they were wrapped in.
    """
    prefix = unwrapped(state)
    state = {name.removeprefix(prefix): value for name, value in state.items()}
    spoken = dialect_of(state)
    if spoken is None or spoken is TORCHVISION_VIT:
        return state, ()
    dropped = tuple(prefix + name for name in state if spoken.ours(name) is None)
    return spoken.to_ours(state), dropped


def in_dialect(state: Mapping[str, Tensor], wanted: Dialect) -> dict[str, Tensor]:
    """Return a backbone's tensors under the names of another library.

    Raises:
        ValueError: the network is not of the family that the library has these names for.
    """
    spoken = dialect_of(state)
    if spoken is None or spoken.family != wanted.family:
        kind = "this network" if spoken is None else f"a {spoken.family}"
        raise ValueError(
            f"{wanted.name}'s names of a {wanted.family} are known, and {kind} is none ({next(iter(state), '')})"
        )
    return wanted.to_theirs(spoken.to_ours(state))


def translate_like(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a backbone's tensors under the names that a module's state dict ``own`` has, as far as can be told."""
    prefix = unwrapped(own)
    wanted = dialect_of(name.removeprefix(prefix) for name in own)
    spoken = dialect_of(state)
    if wanted is not None and spoken is not None and wanted.family == spoken.family and wanted is not spoken:
        state = wanted.to_theirs(spoken.to_ours(state))
    return {prefix + name: value for name, value in state.items()}


FAMILY_NAMES = {"resnet": TORCHVISION_RESNET, "vit": TIMM_VIT}
