"""Stand-ins for what MMEngine stores of its log beside the weights, so that its checkpoints can be read without it."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np


class History:
    """Takes the place of MMEngine's HistoryBuffer; what it held is not needed."""


def harmless() -> list[Any]:
    """What torch's unpickler may build in place of MMEngine's log history: for ``torch.serialization.safe_globals``."""
    if "mmengine.logging" in sys.modules:  # then the history itself is what torch may build, as everywhere
        from .checkpoints import allow_message_hub

        allow_message_hub()
        return []
    # numpy 2 has renamed the module that its arrays are rebuilt by; checkpoints of both may come.
    rebuild: list[Any] = [
        (function, f"numpy.{core}.multiarray.{name}")
        for function, name in (
            (np.array(0.0).__reduce__()[0], "_reconstruct"),
            (np.float64(0.0).__reduce__()[0], "scalar"),
        )
        for core in ("core", "_core")
    ]
    kinds = [type(np.dtype(kind)) for kind in ("f8", "f4", "i8", "i4", "u1", "?")]
    history = [(History, "mmengine.logging.history_buffer.HistoryBuffer")]
    methods = [(_no_method, f"{module}.getattr") for module in ("builtins", "__builtin__")]
    return [np.ndarray, np.dtype, *kinds, *rebuild, *history, *methods]


def _no_method(owner: Any, name: str) -> Any:
    """The buffer stores its own methods, found by getattr: here they are nothing, and else nothing is found."""
    if owner is not History:
        raise pickle.UnpicklingError(f"weights_only: getattr({owner!r}, {name!r}) is not allowed in a checkpoint")
    return None
