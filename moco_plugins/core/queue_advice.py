"""How large a queue may be for a data set."""

from __future__ import annotations

from typing import Any


def suggested_queue_size(images: int) -> int:
    """Return a K for a data set of so many images: the largest power of two that is at most half of it, 65536 at most.

    Half, so that the keys of one image never stand in the queue twice; 65536 is the largest of the MoCo paper (figure 3).
    """
    if images < 2:
        raise ValueError(f"images={images} must be at least 2: one image has no negatives")
    return min(65536, 2 ** ((images // 2).bit_length() - 1))


def queue_advice(queue_size: int, images: int) -> str | None:
    """Say that a queue is too large for a data set, and which K to take; None where K is smaller than the data set.

    A queue of K >= ``images`` holds older keys of the query's own image in every step: it is told to tell an image from
    itself.
    """
    if images < 2 or queue_size < images:
        return None
    return (
        f"queue_size={queue_size} is not smaller than the data set of {images} images: every image meets its own older keys "
        f"as negatives. Try queue_size={suggested_queue_size(images)}"
    )


def advice_for(method: Any, images: Any) -> str | None:
    """The same for any method and data set: None where there is no queue, or nobody knows how many images there are."""
    size = getattr(getattr(method, "queue", None), "size", 0)
    try:
        count = len(images)
    except TypeError:  # a stream
        return None
    return queue_advice(int(size or 0), count)
