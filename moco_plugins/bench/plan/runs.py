"""The runs that a comparison asks for: methods, values of swept options, seeds; and which options a method has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...core.checks import queue_advice
from ...hooks import manager as plugins
from .ablations import ABLATIONS, Variation
from .errors import SettingsError
from .recipes import recipe_of

if TYPE_CHECKING:
    from .settings import Settings

#: Key images that MoCo keeps of recent steps to measure drift; encoding them costs a few percent of a step.
DRIFT_IMAGES = 16


@dataclass(frozen=True)
class RunPlan:
    """One run: a method with its options and a seed."""

    method: str
    label: str
    seed: int
    options: Mapping[str, Any]
    #: Settings that differ from the common ones, such as a learning rate.
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, common: Settings) -> Settings:
        """The settings of this run."""
        return replace(common, **self.recipe)

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        return f"{file_name(self.label)}-seed{self.seed}"


def file_name(label: str) -> str:
    """A label as a part of a file's name."""
    return "".join(c if c.isalnum() or c in "-+.=" else "_" for c in label)


def method_options(name: str) -> dict[str, Any] | None:
    """The options of a method with their defaults, read from its factory's signature; None if it takes any."""
    factory: Callable[..., Any] = plugins.method_factory(name)
    found = {}
    for parameter in list(inspect.signature(factory).parameters.values())[2:]:  # after backbone and feature_dim
        if parameter.kind is parameter.VAR_KEYWORD:
            return None
        found[parameter.name] = parameter.default
    return found


def accepts(method: str, option: str) -> bool:
    """Whether a method has an option."""
    known = method_options(method)
    return known is None or option in known


def variations(settings: Settings) -> list[Variation]:
    """The lines of the comparison, without seeds."""
    if settings.ablation is not None:
        return list(ABLATIONS[settings.ablation].variations)
    if not settings.sweep:
        return [Variation(method, method) for method in settings.methods]
    name, values = next(iter(settings.sweep.items()))
    return [Variation(f"{method} {name}={v}", method, {name: v}) for method in settings.methods for v in values]


def check_options(settings: Settings) -> None:
    """Check the options that were asked for against those that the methods have.

    Raises:
        SettingsError: one is not there; the message lists those that are.
    """
    for name in settings.options:
        if not any(accepts(method, name) for method in settings.methods):
            raise SettingsError(_no_such_option(name, settings.methods))
    for name in settings.sweep:
        without = [method for method in settings.methods if not accepts(method, name)]
        if without:
            raise SettingsError(_no_such_option(name, without) + ". Choose with --methods which to sweep")
    for method, options in settings.method_options.items():
        if method not in settings.methods:
            raise SettingsError(f"--option {method}.{next(iter(options))}: {method!r} is not among --methods")
        for name in options:
            if not accepts(method, name):
                raise SettingsError(_no_such_option(name, [method]))


def _no_such_option(name: str, methods: Sequence[str]) -> str:
    known = {method: ", ".join(sorted(method_options(method) or {})) for method in methods}
    return f"option {name!r}: " + "; ".join(
        f"{method} has not got it, it has {names}" for method, names in known.items()
    )


def plan(settings: Settings) -> list[RunPlan]:
    """The runs of a comparison: seed by seed, so that the first results compare all methods."""
    lines = variations(settings)
    return [
        RunPlan(
            line.method, line.label, seed, options_of(line, settings), recipe_of(line.method, line.recipe, settings)
        )
        for seed in settings.seed_numbers
        for line in lines
    ]


def queue_notes(settings: Settings, images: int) -> list[str]:
    """What to say of queues that are as large as the data set or larger."""
    found: dict[str, str] = {}
    for line in variations(settings):
        if accepts(line.method, "queue_size") and not accepts(line.method, "bank_size"):
            advice = queue_advice(int(options_of(line, settings).get("queue_size") or 0), images)
            if advice is not None:
                found.setdefault(advice, f"{line.label}: {advice}")
    return list(found.values())


def options_of(line: Variation, settings: Settings) -> dict[str, Any]:
    """The options of one line: common ones that the method has, its own, those that vary."""
    options = {name: value for name, value in settings.options.items() if accepts(line.method, name)}
    options.update(settings.method_options.get(line.method, {}))
    options.update(line.options)
    if accepts(line.method, "drift_probe") and options.get("queue_size", 1):
        options.setdefault("drift_probe", DRIFT_IMAGES)
    low = isinstance(line.options.get("momentum"), (int, float)) and line.options["momentum"] < 0.5
    if low and accepts(line.method, "allow_low_momentum"):
        options["allow_low_momentum"] = True  # asked for as one of several values: no mistake of sign
    return options
