"""What a comparison is: its settings, checked before anything runs, and the runs they ask for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import plugins
from ..datasets import ImageArray
from .presets import preset_for

DEFAULT_METHODS = ("moco-v2", "simclr", "byol")


class SettingsError(ValueError):
    """Settings that cannot be carried out; the message names the option, its value and the cure."""


@dataclass(frozen=True)
class Settings:
    """A comparison. Values of None are filled in from the data by :func:`complete`.

    ``options`` are method options by name, for every method that has such an option; ``method.name`` is for one method.
    ``sweep`` is an option with the values to try.
    """

    methods: tuple[str, ...] = DEFAULT_METHODS
    data: str = "mnist5k"
    data_root: str | None = None
    engine: str = "lightning"
    backbone: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    seeds: int = 1
    views: str | None = None
    view_options: Mapping[str, Any] = field(default_factory=dict)
    image_size: int | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    knn_k: int = 20
    knn_temperature: float = 0.1
    device: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    precision: str = "32"
    workers: int = 0
    pretrained: bool = False

    def shared(self) -> dict[str, Any]:
        """What must be the same for two results to be comparable: everything but methods, seeds and engine."""
        kept = asdict(self)
        for name in ("methods", "seeds", "engine", "data_root", "options", "method_options", "sweep", "workers"):
            kept.pop(name)
        return kept


@dataclass(frozen=True)
class Data:
    """A loaded data set."""

    name: str
    train: Any
    test: Any
    channels: int
    image_size: int
    labelled: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class RunPlan:
    """One run: a method with its options and a seed."""

    method: str
    label: str
    seed: int
    options: Mapping[str, Any]

    @property
    def folder(self) -> str:
        """The name of the run's folder."""
        safe = "".join(c if c.isalnum() or c in "-+._=" else "_" for c in self.label)
        return f"{safe}-seed{self.seed}"


def load_data(settings: Settings) -> Data:
    """Load the data set, or the image folder, that the settings name.

    Raises:
        UnknownNameError, DataNotFoundError: there is none.
        SettingsError: it is too small to train and test on.
    """
    name, root = settings.data, settings.data_root
    if name not in plugins.datasets() and Path(name).expanduser().exists():
        name, root = "imagefolder", settings.data
    train, test = plugins.dataset_factory(name)(root)
    if len(train) < 10 or len(test) < 2:
        raise SettingsError(f"data={settings.data!r} has {len(train)} training and {len(test)} test images: too few")
    image = _as_array(train)
    labels = getattr(train, "labels", None)
    labelled = labels is not None if hasattr(train, "labels") else int(train[0][1]) >= 0
    mean, std = _statistics(train, image.shape[0])
    size = settings.image_size or int(getattr(train, "image_size", image.shape[-1]))
    shown = Path(settings.data).name if name == "imagefolder" else name
    return Data(shown, train, test, int(image.shape[0]), size, labelled, mean, std)


def _as_array(train: Any) -> Any:
    from .loader import as_float

    return as_float(train[0][0])


def _statistics(train: Any, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation per channel: of the images where they are in memory, else ImageNet's."""
    if isinstance(train, ImageArray):
        some = train.images[:10_000].float() / 255
        means, stds = some.mean((0, 2, 3)), some.std((0, 2, 3)).clamp_min(1e-3)
        return tuple(round(float(m), 4) for m in means), tuple(round(float(s), 4) for s in stds)
    from ..views import IMAGENET_MEAN, IMAGENET_STD

    return (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.5,) * channels, (0.25,) * channels)


def complete(settings: Settings, data: Data) -> Settings:
    """Fill in what is not given, and check everything that can be checked without training.

    Raises:
        UnknownNameError, SettingsError: a name or value that does not exist or cannot work.
    """
    preset = preset_for(data.channels, data.image_size)
    views = settings.views or preset.views
    for method in settings.methods:
        plugins.method_factory(method)
    adapter = plugins.adapter(settings.engine)
    if adapter.engine is None:
        raise SettingsError(f"engine={settings.engine!r}: this adapter does not train by itself; choose another engine")
    settings = replace(
        settings,
        backbone=settings.backbone or preset.backbone,
        epochs=settings.epochs if settings.epochs is not None else preset.epochs,
        batch_size=settings.batch_size if settings.batch_size is not None else min(preset.batch_size, len(data.train)),
        views=views,
        view_options=settings.view_options or (preset.view_options if views == preset.views else {}),
        image_size=data.image_size,
        learning_rate=settings.learning_rate if settings.learning_rate is not None else preset.learning_rate,
        weight_decay=settings.weight_decay if settings.weight_decay is not None else preset.weight_decay,
        options={**preset.options, **settings.options},
        method_options=settings.method_options,
    )
    _check(settings, data)
    _check_options(settings, preset.options)
    return settings


def _check(settings: Settings, data: Data) -> None:
    for name, least in (("epochs", 1), ("seeds", 1), ("batch_size", 2), ("knn_k", 1), ("devices", 1), ("num_nodes", 1)):
        value = getattr(settings, name)
        if value < least:
            raise SettingsError(f"--{name.replace('_', '-')} {value}: it must be at least {least}")
    if settings.batch_size > len(data.train):  # type: ignore[operator]
        raise SettingsError(
            f"--batch-size {settings.batch_size}: the training set of {data.name} has only {len(data.train)} images"
        )
    if len(set(settings.methods)) < len(settings.methods):
        raise SettingsError(f"--methods {' '.join(settings.methods)}: a method is named twice")
    if len(settings.sweep) > 1:
        raise SettingsError(f"--sweep: one option at a time, not {' and '.join(settings.sweep)}")


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


def _check_options(settings: Settings, preset: Mapping[str, Any]) -> None:
    for name in {*settings.options, *settings.sweep} - set(preset):
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
    name, values = next(iter(settings.sweep.items()), (None, (None,)))
    runs = []
    for seed in range(settings.seeds):
        for method in settings.methods:
            chosen = {k: v for k, v in settings.options.items() if accepts(method, k)}
            chosen.update(settings.method_options.get(method, {}))
            if accepts(method, "drift_probe"):
                chosen.setdefault("drift_probe", 16)
            for value in values:
                options = {**chosen, **({name: value} if name else {})}
                if name == "momentum" and float(value or 0) < 0.5 and accepts(method, "allow_low_momentum"):
                    options["allow_low_momentum"] = True  # asked for by name and value: no mistake of sign
                label = f"{method} {name}={value}" if name else method
                runs.append(RunPlan(method, label, seed, options))
    return runs
