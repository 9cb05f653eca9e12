"""Arguments that the commands of the harness share: what is a setting has the name that it has in ``Settings``."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..sizes import parse_size
from .plan.settings import Settings


def add_data(group: Any, default: str | None) -> None:
    """The data; without a default they must be given."""
    group.add_argument(
        "--data",
        default=default,
        required=default is None,
        metavar="NAME|PATH",
        help="a data set by name, or a folder of images",
    )
    add_root(group)
    add_folder(group)


def add_root(group: Any) -> None:
    """Where data sets are that are known by name."""
    group.add_argument(
        "--data-root", metavar="DIR", help="where downloaded data sets are; default: $MOCO_PLUGINS_DATA or data"
    )


def add_folder(group: Any) -> None:
    """How a folder of images is read and cut."""
    group.add_argument(
        "--channels",
        type=int,
        metavar="N",
        help="of a folder's images; default: 1, 3 or the bands of arrays; 4 keeps alpha",
    )
    group.add_argument(
        "--value-range",
        type=value_range,
        metavar="LOW,HIGH",
        help="black and white in images of more than 8 bits; default: the range of their type",
    )
    group.add_argument(
        "--groups",
        metavar="FILE|DEPTH",
        help="a folder's images that stay on one side of a cut: a table IMAGE,GROUP, or which folder of their path",
    )


def value_range(text: str) -> tuple[float, float]:
    """Read "0,4095".

    Raises:
        ArgumentTypeError: these are not two numbers, the lower one first.
    """
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low = high = 0.0
    if not low < high:
        raise argparse.ArgumentTypeError(f"{text!r}: write it as LOW,HIGH, such as 0,4095")
    return low, high


def add_elsewhere(group: Any) -> None:
    """Where the judging is done with other images than the learning."""
    group.add_argument(
        "--evaluate-on", metavar="NAME|PATH", help="a labelled set that accuracy is measured with; default: the data"
    )


def add_backbone(group: Any) -> None:
    """The backbone and its first weights."""
    group.add_argument("--backbone", metavar="NAME", help="convnet, resnet18-cifar, any of torchvision's or timm's")
    group.add_argument("--pretrained", action="store_true", help="start from the weights that the library downloads")
    group.add_argument(
        "--init", metavar="WEIGHTS", help="start from weights of your own: a file or a folder of pretrain"
    )


def add_recipe(p: argparse.ArgumentParser, methods: str) -> None:
    """The recipe of a training."""
    recipe = p.add_argument_group(
        f"the recipe{methods}",
        "Defaults depend on the size and the number of the images; the report has those in force.",
    )
    recipe.add_argument(
        "--epochs", type=int, metavar="N", help="default: 25 for small grey images, 200 up to 64 pixels, else 100"
    )
    recipe.add_argument(
        "--budget",
        metavar="KIND=N",
        help="instead of epochs: images=N, passes=N (encoder passes, forward and backward) or seconds=S for each run",
    )
    recipe.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="images per step, of all processes together; default: 64 for small grey images, else 256, fewer for small sets",
    )
    recipe.add_argument(
        "--learning-rate",
        type=float,
        metavar="X",
        help="at the top of the schedule; default: of the preset or optimiser",
    )
    recipe.add_argument("--optimizer", choices=("adamw", "sgd", "lars"), help="default: adamw")
    recipe.add_argument(
        "--recipe",
        choices=("common", "own"),
        default="common",
        help="own: each paper's optimiser, schedule and views, scaled to the batch; default: common",
    )
    recipe.add_argument("--weight-decay", type=float, metavar="X")
    recipe.add_argument("--views", metavar="NAME", help="affine, v1, v2, v3, one of a plugin, or own: each method's")
    recipe.add_argument("--image-size", type=parse_size, metavar="PIXELS", help="of a side, or HEIGHTxWIDTH")
    recipe.add_argument(
        "--option",
        "-o",
        dest="options",
        action="append",
        default=[],
        metavar="[METHOD.]NAME=VALUE",
        help="an option of the methods, such as momentum=0.99 or moco-v2.queue_size=4096; may be repeated",
    )
    recipe.add_argument(
        "--view-option",
        dest="view_options",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the views",
    )


def add_how(p: argparse.ArgumentParser, out: str) -> Any:
    """How trainings run; returns the group."""
    how = p.add_argument_group("how it runs")
    how.add_argument(
        "--engine", default="lightning", metavar="NAME", help="an adapter of `moco-plugins plugins`; default: lightning"
    )
    how.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    how.add_argument("--devices", type=int, default=1, metavar="N", help="processes, one device each")
    how.add_argument("--nodes", dest="num_nodes", type=int, default=1, metavar="N")
    how.add_argument("--precision", default="32", help="32, bf16-mixed, 16-mixed")
    how.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that load images; default: none for images in memory, else one a core, at most 8",
    )
    how.add_argument(
        "--checkpoint-minutes",
        type=float,
        default=5.0,
        metavar="N",
        help="at most what a stopped run loses; default: 5 (and at each epoch's end)",
    )
    add_out(how, out)
    how.add_argument(
        "--progress", choices=("bar", "quiet", "json"), default="bar", help="json: one event a line, on stderr"
    )
    how.add_argument("--tensorboard", action="store_true", help="write TensorBoard logs, in OUT/runs/*/tensorboard")
    return how


def add_out(group: Any, out: str) -> None:
    """Where results go."""
    group.add_argument("--out", type=Path, default=Path(out), metavar="DIR", help=f"default: {out}")


def add_knn(group: Any) -> None:
    """The settings of kNN."""
    group.add_argument("--knn-k", type=int, default=20, metavar="K")
    group.add_argument("--knn-temperature", type=float, default=0.1, metavar="T")


def settings_from(arguments: argparse.Namespace, **changes: Any) -> Settings:
    """The settings that a command line asks for; ``changes`` are those that need more than taking over."""
    general: dict[str, Any] = {}
    special: dict[str, dict[str, Any]] = {}
    for name, value in pairs(getattr(arguments, "options", ()), "--option").items():
        method, dot, option = name.rpartition(".")
        (special.setdefault(method, {}) if dot else general)[option] = value
    same = {field.name: getattr(arguments, field.name) for field in fields(Settings) if hasattr(arguments, field.name)}
    view_options = pairs(getattr(arguments, "view_options", ()), "--view-option")
    return Settings(**{**same, "view_options": view_options, "options": general, "method_options": special, **changes})


def pairs(texts: Sequence[str], option: str) -> dict[str, Any]:
    """Read ["name=value", ...]; values are Python literals where they can be, else text.

    Raises:
        ValueError: no equals sign.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"{option} {text!r}: write it as NAME=VALUE")
        found[name] = literal(value)
    return found


def names(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Read names that are separated by spaces, commas or both."""
    return tuple(name for text in texts or () for name in text.split(",") if name)


def literal(text: str) -> Any:
    """A Python literal, or the text itself; ``true`` and ``false`` as in JSON."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
