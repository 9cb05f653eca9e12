"""Batched affine views of small grey images."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moco_plugins.core.views import AffineViews


@pytest.mark.parametrize("shape", [(5, 1, 28, 28), (1, 28, 28), (3, 3, 17, 23)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.uint16])
def test_batched_affine_views(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.rand(shape)
    top = 1 if dtype.is_floating_point else torch.iinfo(dtype).max
    images = (values * top).to(dtype)
    first, second = AffineViews()(images)
    assert first.shape == second.shape == shape
    assert first.dtype == torch.float32
    assert not torch.equal(first, second)
    assert 0 <= float(first.min()) <= float(first.max()) <= 1 + 1e-6
    assert float(first.max()) > 0.3


def test_affine_views_of_no_strength_are_the_image() -> None:
    images = torch.rand(4, 1, 28, 28)
    for view in AffineViews(rotation=0, scale=(1, 1), shift=0, shear=0)(images):
        assert torch.allclose(view, images, atol=1e-5)


def test_affine_views_of_another_size() -> None:
    view: Tensor = AffineViews(image_size=14)(torch.rand(4, 1, 28, 28))[0]
    assert view.shape == (4, 1, 14, 14)
    with pytest.raises(ValueError, match=r"scale=\(0, 1\)"):
        AffineViews(scale=(0, 1))
