"""What is asked of arguments beyond their errors: numpy's numbers, queues that suit the data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference import small_backbone

from moco_plugins import KeyQueue, MoCo
from moco_plugins.core.checks import queue_advice


def test_numpys_whole_numbers_are_whole_numbers() -> None:
    sizes = {name: np.int64(value) for name, value in {"queue_size": 20, "projection_dim": 8, "bn_splits": 2}.items()}
    moco = MoCo(small_backbone(), np.int64(16), **sizes)
    assert type(moco.settings.queue_size) is type(moco.queue.size) is type(moco.feature_dim) is int
    assert KeyQueue(np.int32(7), np.int64(3)).keys.shape == (7, 3)
    with pytest.raises(ValueError, match=r"queue_size=.*-1.*at least 0"):
        MoCo(small_backbone(), 16, queue_size=np.int64(-1))
    with pytest.raises(ValueError, match=r"queue_size=True.*whole number"):
        MoCo(small_backbone(), 16, queue_size=True)


@pytest.mark.parametrize(
    ("size", "images", "suggested"), [(4096, 4000, 512), (4000, 4000, 512), (65536, 50000, 8192), (8, 3, 1)]
)
def test_a_queue_as_large_as_the_data_set_is_advised_against(size: int, images: int, suggested: int) -> None:
    advice = queue_advice(size, images)
    assert advice is not None
    assert f"queue_size={size} " in advice
    assert f"{images} images" in advice
    assert advice.endswith(f"queue_size={suggested}")
    assert queue_advice(suggested, images) is None


@pytest.mark.parametrize(("size", "images"), [(3999, 4000), (0, 4000), (64, 0)])
def test_other_queues_are_not(size: int, images: int) -> None:
    assert queue_advice(size, images) is None


def test_the_suggested_queue_holds_few_images_that_are_asked_for() -> None:
    """What the advice rests on: of shuffled epochs, how many images come back before K others have passed."""
    n, k = 512, 128
    last, again = torch.full((n,), -(10**9)), 0
    generator = torch.Generator().manual_seed(0)
    for epoch in range(20):
        place = epoch * n + torch.randperm(n, generator=generator)
        again += int((place - last <= k).sum()) if epoch else 0
        last = place
    assert again / (19 * n) == pytest.approx(k**2 / (2 * n**2), abs=0.006)
