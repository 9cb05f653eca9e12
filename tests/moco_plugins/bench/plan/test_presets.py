"""Defaults for any number of images."""

from __future__ import annotations

import pytest

from moco_plugins.bench.plan.presets import preset_for
from moco_plugins.core.checks import queue_advice


@pytest.mark.parametrize("images", [100, 500, 1000, 20_000, 1_000_000])
@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32), (3, 224)])
def test_defaults_hold_from_a_hundred_images_to_a_million(images: int, channels: int, size: int) -> None:
    preset = preset_for(channels, size, images)
    assert queue_advice(preset.options["queue_size"], images) is None
    assert 16 <= preset.batch_size <= images
    assert preset.epochs * (images // preset.batch_size) >= 100  # there are steps to learn in
    if preset.epochs * images / preset.batch_size < 1000:  # and the key encoder does not outlast them
        assert preset.options["momentum"] <= 0.99
