"""The parameters of views have the distributions that torchvision's classes draw from."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms import v2

from moco_plugins.core.views.draws import NONE, draw_crop, draw_crops, draw_look, draw_looks
from moco_plugins.core.views.recipes import Recipe, recipes

MANY = 4000
IMPROBABLE = 1e-4


@pytest.mark.parametrize("size", [(400, 500), (32, 32), (100, 20), (20, 100), (3, 3)], ids=str)
@pytest.mark.parametrize("smallest", [0.08, 0.2])
def test_crops_are_those_of_random_resized_crop(size: tuple[int, int], smallest: float) -> None:
    torch.manual_seed(0)
    theirs = v2.RandomResizedCrop(32, scale=(smallest, 1.0))
    image = torch.empty(1, *size)
    found: list[dict[str, int]] = [theirs.make_params([image]) for _ in range(MANY)]
    ours = draw_crops(Recipe((32, 32), (smallest, 1.0)), MANY, *size)
    height, width = (torch.tensor([f[name] for f in found]) for name in ("height", "width"))
    for own, other in (
        (ours.height, height),
        (ours.width, width),
        (ours.height * ours.width, height * width),
        (ours.width / ours.height, width / height),
        (ours.top, torch.tensor([f["top"] for f in found])),
        (ours.left, torch.tensor([f["left"] for f in found])),
    ):
        assert stats.ks_2samp(own.numpy(), other.numpy()).pvalue > IMPROBABLE
    assert stats.binomtest(int(ours.flip.sum()), MANY, 0.5).pvalue > IMPROBABLE


@given(st.tuples(st.integers(1, 300), st.integers(1, 300)), st.floats(0.001, 1), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_crops_lie_within_the_image_and_one_is_as_many(size: tuple[int, int], smallest: float, seed: int) -> None:
    recipe = Recipe((32, 32), (smallest, 1.0))
    torch.manual_seed(seed)
    crops = draw_crops(recipe, 20, *size)
    top, left, height, width, _ = crops
    assert bool((height >= 1).all() and (width >= 1).all() and (top >= 0).all() and (left >= 0).all())
    assert bool((top + height <= size[0]).all() and (left + width <= size[1]).all())
    torch.manual_seed(seed)
    one_by_one = [draw_crop(recipe, *size) for _ in range(20)]
    assert [tuple(int(column[row]) for column in crops) for row in range(20)] == one_by_one


@pytest.mark.parametrize("variant", ["v1", "v2", "v3"])
def test_looks_are_those_of_the_papers(variant: str) -> None:
    torch.manual_seed(1)
    for recipe in recipes(variant, (224, 224), None):
        looks = draw_looks(recipe, MANY)
        untouched = (looks.order == NONE).all(1)
        assert bool(((looks.order == NONE).any(1) == untouched).all())
        for count, p in (
            (int((~untouched).sum()), recipe.jitter_p),
            (int(looks.grey.sum()), recipe.grey_p),
            (int((looks.sigma > 0).sum()), recipe.blur_p),
            (int(looks.solarise.sum()), recipe.solarise_p),
        ):
            assert stats.binomtest(count, MANY, p).pvalue > IMPROBABLE
        orders = Counter(tuple(row) for row in looks.order[~untouched].tolist())
        assert set(orders) == set(itertools.permutations(range(4)))
        assert stats.chisquare(list(orders.values())).pvalue > IMPROBABLE
        *factors, hue = recipe.jitter
        ranges = [*((1 - s, 1 + s) for s in factors), (-hue, hue)]
        for values, (low, high) in zip(looks.factors.T, ranges, strict=True):
            assert stats.kstest(values.numpy(), "uniform", (low, high - low)).pvalue > IMPROBABLE
        if recipe.blur_p:
            blurred = looks.sigma[looks.sigma > 0].numpy()
            assert stats.kstest(blurred, "uniform", (0.1, 1.9)).pvalue > IMPROBABLE


def test_looks_are_drawn_independently_of_each_other() -> None:
    torch.manual_seed(2)
    looks = draw_looks(recipes("v2", (32, 32), None)[0], MANY)
    columns: list[Any] = [*looks.factors.T, looks.grey, looks.sigma > 0, looks.order[:, 0] == NONE]
    correlation = torch.corrcoef(torch.stack([column.double() for column in columns]))
    assert float((correlation - torch.eye(len(columns))).abs().max()) < 0.07


@pytest.mark.parametrize("variant", ["v1", "v2", "v3"])
def test_one_look_is_as_many(variant: str) -> None:
    for recipe in recipes(variant, (32, 32), None):
        torch.manual_seed(4)
        looks = draw_looks(recipe, 50)
        torch.manual_seed(4)
        for row in range(50):
            one, same = draw_look(recipe), type(looks)(*(column[row : row + 1] for column in looks)).one()
            assert (list(one.order), one.grey, one.solarise) == (list(same.order), same.grey, same.solarise)
            assert one.factors == pytest.approx(same.factors)
            assert one.sigma == pytest.approx(same.sigma)
