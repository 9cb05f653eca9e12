"""What a comparison is: its settings, filled in from the data and checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...sizes import Size
from .data import FolderOptions

DEFAULT_METHODS = ("moco-v2", "simclr", "byol")
#: Not part of what must agree for results to stand in one folder.
_FREE = (
    "methods",
    "seeds",
    "first_seed",
    "engine",
    "data_root",
    "options",
    "method_options",
    "method_recipes",
    "sweep",
    "ablation",
    "workers",
    "checkpoint_minutes",
)


@dataclass(frozen=True)
class Settings:
    """A comparison. Values of None are filled in from the data by :func:`complete`.

    ``options`` are method options by name, for every method that has such an option; ``method_options`` are for one.
    ``sweep`` is an option with the values to try; ``ablation`` the name of one that comes with the harness.
    ``tune`` is what each method may choose; ``method_recipes`` is what one has of its own of learning rate and the like.
    """

    methods: tuple[str, ...] = DEFAULT_METHODS
    data: str = "mnist5k"
    data_root: str | None = None
    evaluate_on: str | None = None
    engine: str = "lightning"
    backbone: str | None = None
    epochs: int | None = None
    budget: str | None = None
    batch_size: int | None = None
    seeds: int = 1
    first_seed: int = 0
    views: str | None = None
    view_options: Mapping[str, Any] = field(default_factory=dict)
    image_size: Size | None = None
    channels: int | None = None
    value_range: tuple[float, float] | None = None
    groups: str | None = None
    learning_rate: float | None = None
    weight_decay: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    method_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ablation: str | None = None
    optimizer: str | None = None
    recipe: str = "common"
    schedule: str = "one-cycle"
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    method_recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    knn_k: int = 20
    knn_temperature: float = 0.1
    finetune: int = 0
    device: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    precision: str = "32"
    workers: int | None = None
    checkpoint_minutes: float = 5.0
    pretrained: bool = False
    init: str | None = None
    tensorboard: bool = False

    @property
    def folder(self) -> FolderOptions:
        """How a folder of images is read and cut."""
        return FolderOptions(self.channels, self.value_range, self.groups)

    @property
    def seed_numbers(self) -> range:
        """The seeds of the runs."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def shared(self) -> dict[str, Any]:
        """What must be the same for two results to be comparable: everything but methods, seeds and engine."""
        return {name: value for name, value in asdict(self).items() if name not in (*_FREE, "tensorboard")}
