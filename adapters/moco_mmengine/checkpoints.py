"""MMEngine's checkpoints under torch >= 2.6, and what a checkpoint must fit.

MMEngine 0.10 loads checkpoints with ``torch.load(file)``, which since torch 2.6 unpickles only what is known to be
harmless. Its own log history (``HistoryBuffer``, a pair of numpy arrays) is not on torch's list, so it cannot resume. Here
that class and numpy's arrays are put on the list; everything else that a file may contain stays refused.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def allow_message_hub() -> None:
    """Put what MMEngine stores of its log on torch's list of harmless classes."""
    from mmengine.logging.history_buffer import HistoryBuffer

    # numpy 2 has renamed the module that its arrays are rebuilt by; checkpoints of both may come.
    rebuild: list[tuple[Any, str]] = [
        (function, f"numpy.{core}.multiarray.{name}")
        for function, name in (
            (np.array(0.0).__reduce__()[0], "_reconstruct"),
            (np.float64(0.0).__reduce__()[0], "scalar"),
        )
        for core in ("core", "_core")
    ]
    kinds = [type(np.dtype(kind)) for kind in ("f8", "f4", "i8", "i4", "u1", "?")]
    # The buffer stores its own methods (min, max, ...), which pickle looks up with getattr. That function would open the
    # door to everything; in its place stands one that finds these methods only.
    methods = [(_statistic, f"{module}.getattr") for module in ("builtins", "__builtin__")]
    torch.serialization.add_safe_globals([HistoryBuffer, np.ndarray, np.dtype, *kinds, *rebuild, *methods])


def _statistic(owner: Any, name: str) -> Any:
    from mmengine.logging.history_buffer import HistoryBuffer

    HistoryBuffer()  # its table of methods is empty until there is an instance, as in a process that only resumes
    if owner is not HistoryBuffer or name not in HistoryBuffer._statistics_methods:
        raise pickle.UnpicklingError(f"weights_only: getattr({owner!r}, {name!r}) is not allowed in a checkpoint")
    return HistoryBuffer._statistics_methods[name]


@contextlib.contextmanager
def trusting(trust: bool) -> Iterator[None]:
    """Load anything within this context, code included, if ``trust``; for files whose origin is known."""
    switch = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"  # torch's own
    before = os.environ.get(switch)
    if trust:
        os.environ[switch] = "1"
    try:
        yield
    finally:
        if trust:
            os.environ.pop(switch)
            if before is not None:
                os.environ[switch] = before


def explain_refusal(error: Exception) -> str | None:
    """What to do where torch refused to unpickle a checkpoint, or None if ``error`` is something else."""
    text = str(error)
    if "weights_only" not in text:
        return None
    found = re.search(r"(?:GLOBAL|class|type) (\w+\.[\w.]+)", text)
    what = found[1] if found else "an unknown class"
    return (
        f"the checkpoint contains more than tensors and MMEngine's log ({what}), which may run code when it is loaded. If it "
        f"is your own file or you trust its origin, repeat with --trust-checkpoint. torch said: {text.splitlines()[0]}"
    )


def check_fits(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Raise where a checkpoint that training is to resume from belongs to another model, and say what differs."""
    own = model.state_dict()
    saved = {name.removeprefix("module."): value for name, value in saved.items()}
    problems = []
    missing, extra = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    if not own.keys() & saved.keys():
        raise ValueError(
            f"the checkpoint has no weight in common with this model: it has {_some(extra)}, the model has "
            f"{_some(missing)}. It comes from another model or framework; resume from a file that MMEngine saved, or "
            "use load_from with weights renamed to fit"
        )
    for name in sorted(own.keys() & saved.keys()):
        mine, theirs = own[name], saved[name]
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor) and mine.shape != theirs.shape:
            problems.append(_shape_problem(name, tuple(theirs.shape), tuple(mine.shape), model))
    if missing:
        problems.append(f"it lacks {_some(missing)}")
    if extra:
        problems.append(f"it has {_some(extra)}, which this model has not")
    problems = [problem for problem in problems if problem]
    if problems:
        raise ValueError(
            "the checkpoint does not fit this model: "
            + "; ".join(problems)
            + ". Resume with the same backbone, variant, queue_size and heads, or start anew with load_from"
        )


def _shape_problem(name: str, theirs: tuple[int, ...], mine: tuple[int, ...], model: nn.Module) -> str:
    if name.endswith("queue.keys") and theirs[1:] == mine[1:]:
        queue = model.get_submodule(name.rpartition(".")[0])
        if getattr(queue, "resize", "error") != "error":
            return ""  # the queue takes the newest keys by itself
        return f"its queue has {theirs[0]} keys and this one {mine[0]} (queue_size={theirs[0]} or queue_resize='keep_newest')"
    return f"{name} has shape {theirs} and here {mine}"


def _some(names: list[str]) -> str:
    """The parts of the model that names belong to."""
    parts = list(dict.fromkeys(".".join(name.split(".")[:3]) for name in names))
    return ", ".join(parts[:6]) + (f" and {len(parts) - 6} more" if len(parts) > 6 else "")
