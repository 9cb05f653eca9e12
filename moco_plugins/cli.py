"""The command ``moco-plugins``: pretrain, bench, evaluate, train, plugins, speed, report, convert, inspect."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .bench import command as bench_command
from .bench import evaluate as evaluate_command
from .bench import pretrain as pretrain_command
from .checkpoints import command as checkpoint_commands
from .files import is_full
from .hooks import manager as plugins
from .output import unfailing

METRICS = bench_command.METRICS
PART_KINDS = {
    "queues": "moco_build_queue",
    "momentum rules": "moco_build_momentum",
    "losses": "moco_build_loss",
    "views": "moco_build_views",
}


def parser() -> argparse.ArgumentParser:
    """Build the command line."""
    p = argparse.ArgumentParser(
        prog="moco-plugins", description="MoCo for the frameworks people use, and a fair bench.", allow_abbrev=False
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    pretrain_command.add_arguments(
        commands.add_parser("pretrain", help="train a backbone on your images, keep its weights", allow_abbrev=False)
    )
    bench_command.add_arguments(
        commands.add_parser(
            "bench", help="train methods under the same conditions, evaluate them, write a report", allow_abbrev=False
        )
    )
    evaluate_command.add_arguments(
        commands.add_parser("evaluate", help="judge weights of anybody on labelled images", allow_abbrev=False)
    )
    commands.add_parser("train", help="train a framework's config: moco-plugins train CONFIG", add_help=False)
    commands.add_parser("plugins", help="list who provides what")
    commands.add_parser("speed", help="time the parts of MoCo beside other implementations", add_help=False)
    report = commands.add_parser("report", help="rebuild the report of a bench folder, or merge several into one")
    report.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders that bench has written")
    report.add_argument("--out", type=Path, help="where the report goes; default: the folder itself, if it is one")
    report.add_argument("--metric", choices=METRICS, default="knn_top1", help="what to sort by")
    report.add_argument("--reference", metavar="LABEL", help="the method that others are compared to; default: moco-v2")
    checkpoint_commands.add_commands(commands)
    report.add_argument(
        "--format", choices=("csv", "markdown", "latex"), help="print the table of results so, and write no report"
    )
    return p


def run_report(arguments: argparse.Namespace) -> int:
    """``moco-plugins report``."""
    from .bench.main import need_bench_extra

    need_bench_extra()
    if arguments.format is not None:
        from .bench.report.export import export
        from .bench.report.page import gather

        print(export(gather(arguments.folders), arguments.format, arguments.metric), end="")
        return 0
    if arguments.out is None and len(arguments.folders) > 1:
        raise ValueError("several folders need --out, the folder for the merged report")
    out = arguments.out or arguments.folders[0]
    print(f"\nReport: {bench_command.show(arguments.folders, out, arguments.metric, arguments.reference)}")
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
    from .bench.run.dictionaries import register_dictionaries

    register_dictionaries()
    provided: dict[str, dict[str, list[str]]] = {}
    tables: dict[str, dict[str, tuple[str, Any]]] = {
        "methods": plugins.methods(),
        "data sets": plugins.datasets(),
        "adapters": plugins.adapters(),
        "formats": plugins.checkpoint_formats(),
    }
    for kind, table in tables.items():
        for name, (plugin, _) in table.items():
            provided.setdefault(plugin, {}).setdefault(kind, []).append(name)
    for info in plugins.list_plugins():
        for kind, hook in PART_KINDS.items():  # a plugin need not tell them; then only its documentation names them
            if parts := plugins.part_names(info.name, hook):
                provided.setdefault(info.name, {})[kind] = list(parts)
        print(f"{info.name}  ({info.distribution} {info.version})".rstrip())
        for kind, names in provided.get(info.name, {}).items():
            print(f"  {kind + ':':<16}{', '.join(names)}")
        print(f"  {'hooks:':<16}{', '.join(info.hooks) or 'none'}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status: 0 done, 1 a run failed, 2 what was asked for cannot be done.

    What it prints never raises, whatever the terminal's encoding and whoever has stopped reading.
    """
    with unfailing():
        return _run(list(sys.argv[1:] if argv is None else argv))


def _run(given: list[str]) -> int:
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
        if arguments.command in ("convert", "inspect"):
            return int(arguments.run(arguments))
        command = {"pretrain": pretrain_command, "evaluate": evaluate_command, "bench": bench_command}[
            arguments.command
        ]
        return command.run(arguments, shlex.join(["moco-plugins", *given]))
    except (ValueError, LookupError, ImportError, OSError) as error:
        text = error.args[0] if isinstance(error, LookupError) and error.args else error
        if is_full(error):
            text = f"the disk is full ({error}); make room, and the same command continues"
        print(f"moco-plugins {' '.join(given[:1])}: {text}", file=sys.stderr)
        return 2
