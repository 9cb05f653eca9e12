"""Several optimisers, each of a part of the model, that step on one loss; MMEngine leaves this to the model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def step_together(model: Any, data: Any, wrappers: Sequence[Any]) -> dict[str, Tensor]:
    """Make one training step: one forward and backward pass, then a step of each optimiser.

    Args:
        model: MMEngine's BaseModel.
        data: a batch.
        wrappers: the OptimWrappers.

    Raises:
        ValueError: a wrapper scales the loss or accumulates, which each would do by itself.
    """
    for wrapper in wrappers:
        counts = getattr(wrapper, "_accumulative_counts", 1)
        if counts != 1 or hasattr(wrapper, "loss_scaler"):
            what = f"accumulative_counts={counts}" if counts != 1 else "loss scaling"
            raise ValueError(
                f"{type(wrapper).__name__} in an OptimWrapperDict has {what}, and the optimisers step on one loss; use one "
                "OptimWrapper with paramwise_cfg=dict(custom_keys=...) for rates of their own"
            )
    with contextlib.ExitStack() as contexts:
        for wrapper in wrappers:
            contexts.enter_context(wrapper.optim_context(model))
        losses = model._run_forward(model.data_preprocessor(data, True), mode="loss")
    loss, log_vars = model.parse_losses(losses)
    wrappers[0].backward(loss)
    for wrapper in wrappers:
        wrapper.step()
    for wrapper in wrappers:
        wrapper.zero_grad()
    return log_vars
