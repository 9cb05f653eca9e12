"""Keep bookkeeping out of compiled graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """Run ``function`` as plain Python when its caller is compiled.

    ``torch.compiler.disable`` does this too, but imports the compiler, a second, when it decorates; torch's own
    decorator for its optimisers waits until the first call.
    """
    disable = getattr(torch, "_disable_dynamo", None) or torch.compiler.disable
    return disable(function)
