from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from moco_plugins import TwoViews
from moco_plugins.core.views import AffineViews
from moco_plugins.data.arrays import ImageArray
from moco_plugins.data.images import as_batch
from moco_plugins.data.loader import EpochBatches, Place, ViewPairs, fitting_workers, make_loader
from moco_plugins.data.seeding import key, random_state


def images(count: int = 50, size: int = 12, channels: int = 1) -> ImageArray:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randint(0, 256, (count, channels, size, size), dtype=torch.uint8, generator=generator)
    return ImageArray(pixels, torch.arange(count) % 7)


def batches(epoch: int = 0, seed: int = 0, workers: int = 0, views: Any = None, draws: int = 0) -> list[Any]:
    loader = make_loader(images(), views or AffineViews(), lambda batch: batch, 16, seed, workers)
    loader.batch_sampler.set_epoch(epoch)
    torch.rand(draws)
    return list(loader)


def same(first: list[Any], second: list[Any]) -> bool:
    return all(
        torch.equal(a[0][0], b[0][0]) and torch.equal(a[0][1], b[0][1]) and torch.equal(a[1], b[1])
        for a, b in zip(first, second, strict=True)
    )


def test_depends_on_seed_and_epoch_alone() -> None:
    reference = batches(epoch=3, seed=1)
    assert len(reference) == 3  # 50 images in batches of 16
    assert same(reference, batches(epoch=3, seed=1, draws=17))
    assert not same(reference, batches(epoch=4, seed=1))
    assert not same(reference, batches(epoch=3, seed=2))


def test_views_of_a_pair_differ_and_labels_belong() -> None:
    (first, second), labels = batches()[0]
    assert first.shape == second.shape == (16, 1, 12, 12)
    assert not torch.equal(first, second)
    order = EpochBatches(50, 16, 0)
    assert labels.tolist() == [i % 7 for i in next(iter(order))]


def test_worker_processes_make_the_same_batches() -> None:
    views = TwoViews("v2", 12)
    assert same(batches(epoch=2, views=views), batches(epoch=2, views=views, workers=2))


class Photographs(torch.utils.data.Dataset[Any]):
    """Images of different sizes, one by one, as a folder has them."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Any, int]:
        pixels = np.random.default_rng(index).integers(0, 256, (20 + index, 50 - index, 3), dtype=np.uint8)
        return Image.fromarray(pixels), index % 5


@pytest.mark.parametrize("data", [images(channels=3), Photographs()], ids=["in memory", "photographs"])
@pytest.mark.parametrize("variant", ["v2", "v3"])
def test_views_are_the_same_wherever_they_are_made(data: Any, variant: str) -> None:
    """In this process, in workers, or on the device of an engine: the draws are those of seed, epoch and batch."""

    def made(workers: int = 0, device: str | None = None) -> list[Any]:
        loader = make_loader(data, TwoViews(variant, 12), lambda batch: batch, 16, 0, workers)
        loader.batch_sampler.set_epoch(1)
        found = []
        if (
            device is not None
        ):  # any but the CPU is left to the loader to finish; here "the device" is the CPU all the same
            loader.dataset.only_load = True
            places = list(loader.batch_sampler)
            for (loaded, labels, _), place in zip(loader.__class__.__base__.__iter__(loader), places, strict=True):
                assert all(part.dtype == torch.uint8 for part in loaded)
                found.append((loader.dataset.complete(loaded, place), labels))
            return found
        return list(loader)

    reference = made()
    assert reference[0][0][0].shape == (16, 3, 12, 12)
    assert reference[0][0][0].dtype == torch.float32
    assert same(reference, made(workers=2))
    assert same(reference, made(device="somewhere"))


def test_crops_are_handed_on_as_bytes() -> None:
    pairs = ViewPairs(Photographs(), TwoViews("v2", 12), lambda batch: batch, 0)
    (first, second), labels = pairs.load(Place([3, 1, 8], 0, 0, 0))
    assert first.dtype == second.dtype == torch.uint8
    assert first.shape == second.shape == (3, 3, 12, 12)
    assert labels.tolist() == [3, 1, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("data", [images(channels=3), Photographs()], ids=["in memory", "photographs"])
def test_views_are_finished_on_the_device(data: Any) -> None:
    here = list(make_loader(data, TwoViews("v2", 12), lambda batch: batch, 16, 0))
    loader = make_loader(data, TwoViews("v2", 12), lambda batch: batch, 16, 0, workers=2)
    loader.device = torch.device("cuda")
    for (ours, _), (theirs, _) in zip(here, loader, strict=True):
        assert all(view.is_cuda for view in theirs)
        assert all(torch.allclose(a, b.cpu(), atol=1e-4) for a, b in zip(ours, theirs, strict=True))


def test_workers_fit_the_machine_and_images_in_memory_need_none() -> None:
    views = TwoViews("v2", 12)
    assert fitting_workers(images(), views) == 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    assert fitting_workers(Photographs(), views) == min(8, cores)
    assert fitting_workers(Photographs(), views, processes=10 * cores) == 1


def test_each_step_has_its_own_draws_whatever_was_drawn_before() -> None:
    def draws(extra: int) -> list[float]:
        loader = make_loader(images(), AffineViews(), lambda batch: batch, 16, 0)
        found = []
        for _ in loader:
            found.append(float(torch.rand(())))
            torch.rand(extra)
        return found

    assert draws(0) == draws(5)
    assert len(set(draws(0))) == 3


def test_the_views_leave_all_generators_alone() -> None:
    loader = make_loader(images(), TwoViews("v2", 12), lambda batch: batch, 16, 0)
    before = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
    loader.dataset.__getitems__([1, 2, 3])
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()
    assert before[2] == random.getstate()


def test_random_state_covers_numpy_and_random() -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    with random_state(4):
        first = draw()
    with random_state(4):
        assert draw() == first


def test_an_epoch_shows_each_image_at_most_once() -> None:
    sampler = EpochBatches(50, 16, 0)
    seen = [i for batch in sampler for i in batch]
    assert len(seen) == len(set(seen)) == 48
    sampler.sampler.set_epoch(1)
    assert [i for batch in sampler for i in batch] != seen


def test_on_batch_is_told_the_image_numbers() -> None:
    told: list[Tensor] = []
    loader = make_loader(images(), AffineViews(), lambda batch: batch, 16, 0)
    loader.on_batch = told.append
    for number, (_, labels) in enumerate(loader):
        assert torch.equal(told[number] % 7, labels)


def test_keys_differ() -> None:
    assert len({key(a, b) for a in range(30) for b in range(30)}) == 900


@pytest.mark.parametrize(("size", "batch"), [(10, 16), (10, 1)])
def test_batch_size_that_cannot_work(size: int, batch: int) -> None:
    with pytest.raises(ValueError, match=f"batch_size={batch}"):
        EpochBatches(size, batch, 0)


def test_as_batch_cuts_the_middle() -> None:
    batch, labels = as_batch(images(3, 12, 3), [2, 0], image_size=6)
    assert batch.shape == (2, 3, 6, 6)
    assert 0 <= float(batch.min()) <= float(batch.max()) <= 1
    assert labels.tolist() == [2, 0]


def rank_slices() -> list[list[int]]:
    return [list(batch) for batch in EpochBatches(50, 16, 0)]


def test_two_ranks_share_each_batch(two_ranks: Any) -> None:
    whole = rank_slices()
    first, second = two_ranks.run(rank_slices)
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
