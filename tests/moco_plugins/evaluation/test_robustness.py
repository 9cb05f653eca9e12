from __future__ import annotations

import pytest
import torch

from moco_plugins.evaluation import CORRUPTIONS, expected_calibration_error
from moco_plugins.evaluation.robustness import blur, contrast, noise


@pytest.mark.parametrize("name", list(CORRUPTIONS))
def test_corruptions_grow_with_their_strength_and_stay_images(name: str) -> None:
    images = torch.rand(4, 3, 32, 24, generator=torch.Generator().manual_seed(0))
    before = images.clone()
    made = [CORRUPTIONS[name](images, strength, 0) for strength in (1, 2, 3, 4, 5)]
    away = [float((one - images).square().mean()) for one in made]
    assert away == sorted(away)
    assert away[0] > 0
    assert all(one.shape == images.shape and 0 <= float(one.min()) <= float(one.max()) <= 1 + 1e-6 for one in made)
    assert torch.equal(images, before)
    with pytest.raises(ValueError, match="strength=6 is not one of 1, 2, 3, 4, 5"):
        CORRUPTIONS[name](images, 6, 0)


def test_each_corruption_does_what_it_says() -> None:
    images = torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    drawn = noise(torch.full((4, 3, 64, 64), 0.5), 3) - 0.5
    assert float(drawn.std()) == pytest.approx(0.08, rel=0.02)
    assert torch.equal(noise(images, 2, seed=1), noise(images, 2, seed=1))
    flat = torch.full((1, 3, 16, 16), 0.3)
    assert torch.allclose(blur(flat, 5), flat, atol=1e-6)  # a blur of one colour is that colour
    assert float(blur(images, 5).std()) < float(images.std())
    assert torch.allclose(contrast(images, 2).mean((1, 2, 3)), images.mean((1, 2, 3)))
    assert float(contrast(images, 2)[0].std()) == pytest.approx(0.5 * float(images[0].std()), rel=1e-4)


def test_calibration_error_of_known_cases() -> None:
    sure = torch.tensor([[1.0, 0.0]] * 4)
    assert expected_calibration_error(sure, torch.tensor([0, 0, 0, 0])) == 0
    assert expected_calibration_error(sure, torch.tensor([0, 0, 1, 1])) == pytest.approx(0.5)
    honest = torch.tensor([[0.75, 0.25]] * 4)
    assert expected_calibration_error(honest, torch.tensor([0, 0, 0, 1])) == pytest.approx(0)
    mixed = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
    # one bin is 0.9 sure and half right, the other 0.6 sure and always right: (0.4 + 0.4) / 2
    assert expected_calibration_error(mixed, torch.tensor([0, 1, 1, 1]), bins=10) == pytest.approx(0.4)
    with pytest.raises(ValueError, match="probabilities has shape"):
        expected_calibration_error(sure, torch.tensor([0]))
