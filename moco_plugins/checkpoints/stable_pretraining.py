"""galilai-group/stable-pretraining: MoCo v2 and v3 as pairs of student and teacher."""

from __future__ import annotations

from .formats import Format
from .reading import Content
from .weights import Weights

#: Counters and coefficients of the averages, which schedules here do not need.
_COUNTERS = ("ema_coefficient", "base_ema_coefficient", "final_ema_coefficient", "queue.initialized")


def read(content: Content) -> Weights | None:
    """A Lightning checkpoint of ``MoCov2`` or ``MoCov3``; its queue is (K, D) already."""
    if not content.has("backbone.student.", "backbone.teacher.", "projector.student.", "projector.teacher."):
        return None
    queue, ptr, full = content.pop("queue.out"), content.pop("queue.pointer"), content.pop("queue.filled")
    for name in [name for name in content.state if name.endswith(_COUNTERS)]:
        content.pop(name)
    step = content.raw.get("global_step")
    row = 0 if ptr is None else int(ptr)
    return Weights(
        "",
        content.take("backbone.student."),
        content.take("projector.student."),
        content.take("predictor."),
        content.take("backbone.teacher."),
        content.take("projector.teacher."),
        queue=queue,
        queue_ptr=row,
        queue_filled=None if queue is None or full is None or bool(full) else row,
        steps=step if isinstance(step, int) else None,
        about={"epoch": content.raw["epoch"]} if isinstance(content.raw.get("epoch"), int) else {},
    )


FORMATS = {"stable-pretraining": Format("galilai-group/stable-pretraining (MoCov2, MoCov3)", read)}
