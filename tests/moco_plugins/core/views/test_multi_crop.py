"""Multi-crop (SwAV, arXiv:2006.09882, section 3.2): small crops besides the two views, as further queries."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from moco_plugins import MoCo, TwoViews, info_nce
from moco_plugins.backbones import build_backbone


def test_local_views_follow_the_two() -> None:
    views = TwoViews("v2", 32, local_views=3, local_size=(12, 16))
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8))
    shapes = [(3, 32, 32)] * 2 + [(3, 12, 16)] * 3
    assert [tuple(view.shape) for view in views(image)] == shapes
    assert [tuple(view.shape) for view in views.crop(image)] == shapes
    batch = torch.randint(0, 256, (5, 3, 40, 40), dtype=torch.uint8)
    assert [tuple(view.shape) for view in views(batch)] == [(5, *shape) for shape in shapes]
    assert views.finish(torch.stack([views.crop(image)[4]] * 5), 4).shape == (5, 3, 12, 16)


def test_local_views_are_of_small_parts() -> None:
    # SwAV: 0.05 to 0.14 beside 0.14 to 1; the ranges meet.
    views = TwoViews("v2", 64, min_scale=0.14, local_views=2, local_size=24)
    assert views.recipes[0].scale == (0.14, 1.0)
    assert views.recipes[2].scale == (0.05, 0.14)
    assert TwoViews("v2", 64, local_views=1, local_size=24, local_scale=(0.1, 0.3)).recipes[2].scale == (0.1, 0.3)
    v3 = TwoViews("v3", 64, local_views=1, local_size=24).recipes[2]
    assert (v3.blur_p, v3.solarise_p, v3.jitter_p) == (0.5, 0.0, 0.8)
    ramp = torch.linspace(0, 1, 64).expand(1, 64, 64)  # a crop's range of values tells its width
    widths = [float(view.amax() - view.amin()) for _ in range(100) for view in views(ramp)[2:]]
    assert stats.scoreatpercentile(widths, 50) < 0.45


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_views": -1}, "local_views=-1"),
        ({"local_views": 2, "local_size": 32}, "local_size=32 must be smaller than image_size=32"),
        ({"local_views": 2, "local_size": 16, "local_scale": (0.5, 0.1)}, r"local_scale=\(0.5, 0.1\)"),
    ],
    ids=str,
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TwoViews("v2", 32, **options)


def moco(**options: Any) -> MoCo:
    torch.manual_seed(0)
    backbone, width = build_backbone("convnet", 3, 32)
    return MoCo(backbone, width, queue_size=16, projection_dim=8, shuffle_bn=False, **options)


def crops(count: int = 2, n: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [32, 32, *[16] * count]
    return [torch.rand(n, 3, size, size, generator=generator) for size in sizes]


@pytest.mark.parametrize("variant", ["v2", "v2+"])
def test_each_local_crop_is_one_more_query_against_the_same_keys(variant: str) -> None:
    model = moco(variant=variant).eval()
    x_q, x_k, *local = crops()
    unit = torch.nn.functional.normalize
    keys = [unit(model.key_encoder(x), dim=1) for x in ([x_k, x_q] if variant == "v2+" else [x_k])]
    large = [x_q, x_k] if variant == "v2+" else [x_q]
    pairs = [*zip(large, keys, strict=True), *((crop, key) for crop in local for key in keys)]
    bank = model.queue.negatives()
    expected = torch.stack([info_nce(unit(model.query_encoder(x), dim=1), k, bank, 0.2) for x, k in pairs]).mean()
    assert torch.allclose(model([x_q, x_k, *local]), expected, atol=1e-5)


def test_local_crops_put_no_keys_into_the_queue() -> None:
    model, plain = moco(), moco()
    for each, views in ((model, crops()), (plain, crops()[:2])):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        each(views).backward()
        optimizer.step()
    assert model.steps == plain.steps == 1
    assert int(model.queue.ptr) == int(plain.queue.ptr) == 6
    assert torch.allclose(model.queue.keys[:6], plain.queue.keys[:6], atol=1e-6)


def test_a_third_view_that_is_no_local_crop_is_an_error() -> None:
    views = crops()
    model = moco()
    for wrong in (views[0] + 1, views[2][:3], copy.copy(views[2]).flatten(1)):
        with pytest.raises(TypeError, match="views is a list of 3"):
            model([*views[:2], wrong])
