"""Is it learning, has it collapsed, are the keys stale? Computed when asked for, from the last step's tensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Features have collapsed where their std is under a tenth of 1/sqrt(D), that of unit vectors spread evenly. Untrained
#: networks come near that, so at first only a hundredth counts.
COLLAPSE_RATIO, EARLY_COLLAPSE_RATIO, EARLY_STEPS = 0.1, 0.01, 100


class LastStep(NamedTuple):
    """What one forward pass leaves behind for :func:`describe`; references, nothing computed."""

    loss: Tensor
    query: Tensor  #: (N, D), normalised
    keys: Sequence[Tensor]  #: (N, D) each, normalised: the positives of ``query``, then of the other half if symmetric
    temperature: float | Tensor
    negative_count: int
    in_batch: bool  #: the other keys of the batch are negatives too


def effective_rank(features: Tensor) -> float:
    """Return exp(entropy of the normalised singular values) of (N, D) features (Roy & Vetterli 2007): 1 is collapse."""
    if not torch.isfinite(features).all():
        return math.nan
    singular = torch.linalg.svdvals(features.float())
    p = singular / singular.sum().clamp_min(1e-12)
    return float(torch.exp(-(p * torch.log(p.clamp_min(1e-12))).sum()))


@torch.no_grad()
def describe(last: LastStep, queue: Any) -> dict[str, float]:
    """Return the metrics of a step against the keys that are in the queue now (None: there is no queue).

    loss, and loss_reference = ln(negatives + 1), the loss of an encoder that cannot tell keys apart; positive_cosine and
    negative_cosine (means); contrastive_top1, how often the positive is nearest; feature_std of the queries over the batch
    (mean over dimensions) and feature_std_reference = 1/sqrt(D), that of unit vectors spread evenly; effective_rank of the
    queries; temperature; queue_filled (fraction of real keys) and nonfinite_keys (turned away so far).
    """
    q, k = last.query.float(), last.keys[0].float()
    positive = (q * k).sum(1)  # N
    metrics = {
        "loss": float(last.loss),
        "loss_reference": math.log(last.negative_count + 1),
        "positive_cosine": float(positive.mean()),
        "feature_std": float(q.std(0, correction=0).mean()),
        "feature_std_reference": 1 / math.sqrt(q.shape[1]),
        "effective_rank": effective_rank(q),
        "temperature": float(last.temperature),
    }
    cosines = q.new_zeros(q.shape[0], 0)  # N x negatives
    if queue is not None:
        metrics["queue_filled"] = int(getattr(queue, "filled", 0)) / queue.size
        metrics["nonfinite_keys"] = float(getattr(queue, "skipped", 0))
        cosines = q @ _others(queue.negatives(), last.keys).float().T
    if last.in_batch:
        others = ~torch.eye(q.shape[0], dtype=torch.bool, device=q.device)
        cosines = torch.cat([cosines, (q @ k.T)[others].view(q.shape[0], -1)], dim=1)
    if cosines.shape[1]:
        metrics["negative_cosine"] = float(cosines.mean())
        metrics["contrastive_top1"] = float((positive > cosines.amax(1)).float().mean())
    return metrics


def _others(negatives: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """The negatives without the step's own keys: once the step is committed, they are in the queue too."""
    own = torch.cat(list(keys)).to(negatives.dtype)
    others = negatives[(negatives @ own.T).amax(1) < 1 - 1e-6]
    return others if others.shape[0] else negatives  # after a collapse all keys are one


def warn_of_collapse(metrics: dict[str, float], steps: int = 0, known: bool = False) -> bool:
    """Warn where the features have collapsed, unless that is known already, and say what to try; True if collapsed."""
    ratio = COLLAPSE_RATIO if steps >= EARLY_STEPS else EARLY_COLLAPSE_RATIO
    if not metrics["feature_std"] < ratio * metrics["feature_std_reference"]:
        return False
    if known:
        return True
    warnings.warn(
        f"the features have collapsed: their std is {metrics['feature_std']:.4f}, spread evenly it would be "
        f"{metrics['feature_std_reference']:.4f}. Try a lower learning rate or a warm-up, a momentum nearer to 1 (0.99 to "
        "0.999), a larger queue, stronger views, and check that the images differ",
        stacklevel=3,
    )
    return True


class Monitor:
    """Looks at what the last forward pass has left behind, when asked, and remembers whether collapse was told."""

    def __init__(self) -> None:
        self.last: LastStep | None = None
        self._collapsed = False

    def remember(
        self,
        loss: Tensor,
        query: Tensor,
        keys: Sequence[Tensor],
        temperature: float | Tensor,
        negative_count: int,
        in_batch: bool,
    ) -> None:
        """Keep what a forward pass leaves behind, see :class:`LastStep`, without its graph."""
        held = temperature.detach() if isinstance(temperature, Tensor) else temperature
        self.last = LastStep(loss.detach(), query.detach(), keys, held, negative_count, in_batch)

    def metrics(self, queue: Any, steps: int) -> dict[str, float]:
        """Return the metrics of the last forward pass, empty before the first; warn once where features collapse."""
        if self.last is None:
            return {}
        metrics = describe(self.last, queue)
        if self.last.query.shape[0] > 1:  # one image has no spread
            self._collapsed = warn_of_collapse(metrics, steps, known=self._collapsed)
        return metrics

    def __getstate__(self) -> dict[str, Any]:
        # The last step's tensors are for looking at only, and its loss belongs to the original's graph.
        return {**self.__dict__, "last": None}
