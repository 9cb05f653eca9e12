"""How large a queue may be for a data set."""

from __future__ import annotations

import pytest

from moco_plugins import MoCo
from moco_plugins.backbones import ConvNet
from moco_plugins.bench.plan.presets import preset_for
from moco_plugins.core.queue_advice import advice_for, queue_advice, suggested_queue_size


@pytest.mark.parametrize(("images", "expected"), [(2, 1), (100, 32), (10_000, 4096), (1_281_167, 65536)])
def test_the_suggestion_is_a_power_of_two_in_half_of_the_set(images: int, expected: int) -> None:
    assert suggested_queue_size(images) == expected


def test_a_queue_as_large_as_the_set_or_larger_is_told_with_a_better_one() -> None:
    assert queue_advice(999, 1000) is None
    for size in (1000, 65536):
        assert f"queue_size={size} is not smaller than the data set of 1000 images" in str(queue_advice(size, 1000))
        assert "Try queue_size=256" in str(queue_advice(size, 600))


def test_methods_without_a_queue_and_streams_get_none() -> None:
    assert advice_for(MoCo(ConvNet(1, width=2), 32, queue_size=64, projection_dim=8), range(64)) is not None
    assert advice_for(MoCo(ConvNet(1, width=2), 32, queue_size=64, projection_dim=8), iter(())) is None
    assert advice_for(MoCo(ConvNet(1, width=2), 32, "v3", queue_size=0, projection_dim=8), range(64)) is None


@pytest.mark.parametrize("images", [100, 500, 1000, 20_000, 1_000_000])
@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32), (3, 224)])
def test_defaults_hold_from_a_hundred_images_to_a_million(images: int, channels: int, size: int) -> None:
    preset = preset_for(channels, size, images)
    assert preset.options["queue_size"] < images
    assert 16 <= preset.batch_size <= images
    assert preset.epochs * (images // preset.batch_size) >= 100  # there are steps to learn in
    if preset.epochs * images / preset.batch_size < 1000:  # and the key encoder does not outlast them
        assert preset.options["momentum"] <= 0.99
