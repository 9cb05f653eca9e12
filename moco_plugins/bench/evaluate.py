"""The command ``moco-plugins evaluate``: weights of anybody, judged on labelled images; nothing is trained first."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..sizes import parse_size
from . import arguments as shared
from .command import METRICS, show


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    p.description = (
        "Judge frozen backbones on labelled images: kNN, linear probes with all and with few labels, and with --finetune the "
        "whole network. WEIGHTS are files of any known format: of pretrain and bench, torchvision's, timm's, others'."
    )
    what = p.add_argument_group("what is judged, on what")
    what.add_argument("weights", nargs="+", metavar="WEIGHTS", help="files, or folders of pretrain")
    shared.add_data(what, None)
    what.add_argument("--backbone", metavar="NAME", help="what the weights are of, where they do not tell it")
    what.add_argument(
        "--image-size",
        type=parse_size,
        metavar="PIXELS",
        help="a side, or HEIGHTxWIDTH; default: what they were trained at, else the data's",
    )
    how = p.add_argument_group("how")
    how.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    shared.add_out(how, "evaluated")
    how.add_argument(
        "--finetune",
        type=int,
        nargs="?",
        const=10,
        default=0,
        metavar="EPOCHS",
        help="train the whole network on the labels, too, for 10 epochs or so many; on a CPU that takes its time",
    )
    shared.add_knn(how)
    how.add_argument("--metric", choices=METRICS, default=METRICS[0], help=f"what to sort by; default: {METRICS[0]}")
    how.add_argument(
        "--progress", choices=("bar", "quiet", "json"), default="bar", help="json: one event a line, on stderr"
    )


def run(arguments: argparse.Namespace, command: str) -> int:
    """Carry out ``moco-plugins evaluate``; return its exit status."""
    from .main import need_bench_extra
    from .run.progress import make_progress

    need_bench_extra()
    settings = shared.settings_from(arguments)
    evaluate(settings, arguments.weights, arguments.out, make_progress(arguments.progress), command)
    path = show([arguments.out], arguments.out, arguments.metric, None)
    print(f"\nReport: {path}   numbers: {arguments.out / 'results.json'}")
    return 0


def evaluate(settings: Any, paths: Sequence[str], out: Path, progress: Any, command: str = "") -> dict[str, Any]:
    """Judge the backbones of weight files; return what ``results.json`` in ``out`` has, one record a file.

    Args:
        settings: a :class:`moco_plugins.bench.plan.settings.Settings`, of which data, backbone (for files that do not tell
            theirs), image size, device and kNN count.
        paths: the files.
        out: the folder; what it has of other evaluations is replaced.
        progress: told what happens.
        command: the command line, for the report.

    Raises:
        SettingsError, ValueError, OSError: no labels, weights that nobody can read or that fit no backbone; nothing is
            written then.
    """
    from ..data.telling import telling
    from .main import about_the_machine, described
    from .measures import score
    from .plan.data import load_data
    from .plan.errors import SettingsError
    from .results import Results, plain, write_results
    from .run.judged import judge, open_all, untrained_and_raw

    if settings.finetune < 0:
        raise SettingsError(f"--finetune {settings.finetune}: it must be at least 1 epoch")
    with telling(progress.say):
        data = load_data(settings.data, settings.data_root, settings.image_size, settings.knn_k, settings.folder)
    if not data.labelled:
        raise SettingsError(f"--data {settings.data}: {data.notes[0]} evaluate needs labels to judge by")
    if (out / "results.json").exists() and Results(out).content.get("kind") != "evaluate":
        raise SettingsError(f"--out {out} holds results of a training; give another --out")
    judged = open_all(paths, settings, data)
    runs, said = [], "mAP: kNN" if data.measure == "map" else "kNN"
    for one in judged:
        for note in one.notes:
            progress.say(f"{one.label}: {note}")
        runs.append(judge(one, settings))
        knn, linear = (100 * score(runs[-1], name) for name in ("knn_top1", "linear_top1"))
        progress.say(f"{one.label}: {said} {knn:.1f} %, linear {linear:.1f} %")
    content = {
        "kind": "evaluate",
        "settings": plain({name: getattr(settings, name) for name in ("data", "knn_k", "knn_temperature", "finetune")}),
        "baselines": plain(untrained_and_raw(judged, settings)),
        "runs": plain(runs),
        "data": plain(described(data)),
        "commands": [command] if command else [],
        **about_the_machine(),
    }
    out.mkdir(parents=True, exist_ok=True)
    write_results(out, content)
    return content
