"""The command ``moco-plugins pretrain``: one method on anybody's images, with the machinery of the comparison."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import arguments as shared

METHOD = "moco-v2"


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    p.description = (
        "Train a backbone on images without labels, and keep its weights. Where there are labels, they are used for "
        "measuring accuracy only. An interrupted command continues where it is given again."
    )
    what = p.add_argument_group("what is trained")
    what.add_argument("data", metavar="IMAGES", help="a folder of images, or a data set by name")
    what.add_argument("--method", default=METHOD, metavar="NAME", help=f"default: {METHOD}; see: moco-plugins plugins")
    shared.add_root(what)
    shared.add_folder(what)
    shared.add_elsewhere(what)
    shared.add_backbone(what)
    what.add_argument("--seed", dest="first_seed", type=int, default=0, metavar="N", help="default: 0")
    shared.add_recipe(p, "")
    shared.add_knn(shared.add_how(p, "pretrained"))


def run(arguments: argparse.Namespace, command: str) -> int:
    """Carry out ``moco-plugins pretrain``; return its exit status."""
    from .main import need_bench_extra
    from .measures import score
    from .report.training_page import health
    from .run.progress import make_progress
    from .run.set_up import first_process

    need_bench_extra("safetensors")
    settings = shared.settings_from(arguments, methods=(arguments.method,), seeds=1)
    try:
        record = pretrain(settings, arguments.out, make_progress(arguments.progress), command)
    except KeyboardInterrupt:
        minutes = f"{arguments.checkpoint_minutes:g}"
        print(f"\nStopped. The same command continues; at most {minutes} minutes are lost.", file=sys.stderr)
        return 130
    if not first_process():
        return 0
    if record["status"] != "finished":
        return 1
    for sentence in health(record):
        print(f"- {sentence}")
    for name, title in (("knn_top1", "kNN"), ("linear_top1", "linear probe")):
        if score(record, name) is not None:
            kind = "accuracy" if name in record else "mean average precision"
            print(f"- {title} {kind} {100 * score(record, name):.1f} %")
    print(f"\nWeights: {arguments.out / 'weights.safetensors'}   report: {arguments.out / 'report.html'}")
    return 0


def pretrain(settings: Any, out: Path, progress: Any, command: str = "") -> dict[str, Any]:
    """Train one method into the folder ``out``; return the record of its run, as it is in ``results.json``.

    ``out`` gets ``weights.safetensors``, ``weights.json`` and ``report.html``; what is there is continued.

    Args:
        settings: a :class:`moco_plugins.bench.plan.settings.Settings` of one method and one seed.
        out: the folder.
        progress: told what happens.
        command: the command line, for the page.

    Raises:
        KeyboardInterrupt: stopped by the user; the same call continues.
        SettingsError and others before anything runs: settings, names or data that do not work.
    """
    from ..data.telling import telling
    from .main import describe, one, try_to_build, with_notes
    from .plan.complete import complete
    from .plan.learning import data_of, to_pretrain_on
    from .plan.runs import plan
    from .results import Results
    from .run.baselines import baselines
    from .run.dictionaries import register_dictionaries
    from .run.lengths import measure_lengths
    from .run.pictures import draw_views
    from .run.set_up import first_process

    register_dictionaries()
    with telling(progress.say):
        data = to_pretrain_on(data_of(settings))
    settings = complete(settings, data)
    data = with_notes(data, settings)
    with telling(progress.say):
        try_to_build(settings, data)
    (run,) = plan(settings)
    results = Results(out, settings)
    _must_agree(results, run, settings)
    data = data.of_seed(run.seed)
    record = results.find(run, settings.engine)
    if record is None:
        if first_process():
            describe(results, settings, data, command)
            for note in data.notes:
                progress.say(note)
            draw_views(settings, data, results.folder / "figures")
            if data.labelled and not results.content["baselines"]:
                results.content["baselines"] = baselines(settings, data, run.seed, raw=False)
            results.save()
        measure_lengths([run], settings, data, results.folder)
        one(run, results, settings, data, InWords(progress, settings.epochs))
        record = next(
            (r for r in results.runs if (r["label"], r["seed"]) == (run.label, run.seed)), {"status": "elsewhere"}
        )
    if first_process() and record["status"] == "finished":
        _keep(results.content, record, settings, data, out, run)
    return record


def _must_agree(results: Any, run: Any, settings: Any) -> None:
    """One folder is one pretraining: another method, seed or option would go on from weights that are not its own."""
    from .plan.errors import SettingsError
    from .results import plain

    now = plain({"method": run.method, "engine": settings.engine, "seed": run.seed, **run.options})
    before = results.content.setdefault("pretraining", now)
    differ = [
        f"{k} was {before.get(k)!r}, now {now.get(k)!r}" for k in {**before, **now} if before.get(k) != now.get(k)
    ]
    if differ:
        raise SettingsError(
            f"--out {results.folder} holds another pretraining ({'; '.join(differ)}). Give the same settings to continue "
            "there, or another --out"
        )


def _keep(content: Mapping[str, Any], record: Mapping[str, Any], settings: Any, data: Any, out: Path, run: Any) -> None:
    """Write weights and page from what the run has left; the copy in its folder goes, once they are there."""
    import torch

    from .report.training_page import health, write_training_page
    from .run.one_run import WEIGHTS as KEPT
    from .run.set_up import run_folder
    from .run.weights import loading_code, write_weights

    kept = run_folder(out, run, settings) / KEPT
    if kept.exists():
        saved = torch.load(kept, weights_only=True)
        state = saved.pop("state_dict")
        made = {
            "command": content["commands"][-1] if content["commands"] else None,
            "data": {"name": data.learnt_from or data.name, "images": len(data.pretrain)},
            **{name: content["settings"].get(name) for name in _MADE},
            **{name: record.get(name) for name in ("engine", "epochs", "steps", "images_seen", "seconds", "options")},
            "versions": content["versions"],
            "date": content["date"],
        }
        measured_names = (*_MEASURED, *(name.replace("top1", "map") for name in _MEASURED if "top1" in name))
        measured = {name: record[name] for name in measured_names if record.get(name) is not None}
        about = {**saved, "measured": {**measured, "in_words": health(record)}, "made": made}
        write_weights(state, about, out)
    write_training_page(content, "weights.safetensors", loading_code(settings, data), out)
    kept.unlink(missing_ok=True)


_MADE = ("batch_size", "learning_rate", "weight_decay", "views", "view_options", "precision", "pretrained", "init")
_MEASURED = ("knn_top1", "linear_top1", "linear_top1_10pct", "linear_top1_1pct", "uniformity", "effective_rank")


class InWords:
    """Progress that says in words, after each look at the training, whether what it found is normal."""

    def __init__(self, progress: Any, epochs: int | None) -> None:
        self.progress, self.epochs = progress, epochs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.progress, name)

    def epoch(self, epoch: int, values: dict[str, float]) -> None:
        """Pass it on, and say it."""
        from .report.health import in_words

        self.progress.epoch(epoch, values)
        of = f" of {self.epochs}" if self.epochs else ""
        self.progress.say(f"epoch {epoch}{of}: {'; '.join(in_words(values))}")
