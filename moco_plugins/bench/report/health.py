"""Is this loss normal? What a look at a training says, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping

#: Part of ln(K + 1) from which on a loss is called that of guessing, and above which it is worse than guessing.
GUESSING, WORSE = 0.97, 1.03
#: Keys this far (1 - cosine) from what the key encoder makes of their images today are stale.
STALE = 0.2
#: Features have collapsed under this part of an even spread.
COLLAPSED = 0.1


def loss_in_words(loss: float, reference: float | None, filled: float = 1.0) -> str:
    """What a loss means beside ``reference`` = ln(K + 1), with a queue of which the part ``filled`` holds real keys."""
    if reference is None or not reference > 0:
        return f"loss {loss:.3f}"
    beside = f"loss {loss:.2f}, ln(K + 1) = {reference:.2f}"
    if not math.isfinite(loss):
        return f"{beside}: the training has failed; try a lower --learning-rate"
    if filled < 1:
        return f"{beside}: the queue still fills ({100 * filled:.0f} %), and the loss rises as it does: normal"
    if loss > WORSE * reference:
        return f"{beside}: worse than guessing; normal in the first epoch only, else try a lower --learning-rate"
    if loss >= GUESSING * reference:
        return f"{beside}: as good as guessing; normal in the first epochs, not at the end"
    return f"{beside}: below guessing, so it learns: normal"


def in_words(values: Mapping[str, float | None]) -> list[str]:
    """Sentences of one look at a training: its loss, how often the right key wins, drift of the keys, collapse.

    Args:
        values: ``loss`` and what the method told, with ``metric_`` before the names, as in the curve of results.json.
    """

    def of(name: str) -> float | None:
        return values.get(f"metric_{name}")

    filled = of("queue_filled")
    said = [loss_in_words(values.get("loss") or math.nan, of("loss_reference"), 1.0 if filled is None else filled)]
    top1, reference = of("contrastive_top1"), of("loss_reference")
    if top1 is not None:
        chance = "" if reference is None else f" (by chance {100 * math.exp(-reference):.2g} %)"
        said.append(f"the right key is nearest for {100 * top1:.0f} % of the images{chance}")
    drift = of("key_drift")
    if drift is not None:
        fresh = (
            "the keys are fresh"
            if drift < STALE
            else "the keys are stale: try a momentum nearer to 1, or a smaller queue"
        )
        said.append(f"{fresh} (drift {drift:.2g})")
    std, even = of("feature_std"), of("feature_std_reference")
    if std is not None and even:
        part = f"{100 * std / even:.0f} % of an even spread"
        if std < COLLAPSED * even:
            said.append(f"the features have collapsed ({part}): try a lower --learning-rate, or stronger views")
        else:
            said.append(f"the features spread ({part})")
    return said
