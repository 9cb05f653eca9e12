"""Adapters hand on the image numbers of a batch; engines too: tests/adapters/test_every_adapter.py."""

from __future__ import annotations

import torch


def test_lightlys_filenames_become_numbers_that_are_the_same_everywhere() -> None:
    from moco_lightly.batches import ids

    views = (torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4))
    labels = torch.zeros(2).long()
    numbers = ids((views, labels, ["a/0.png", "b/1.png"]))
    assert numbers is not None
    assert numbers.tolist() == [int(numbers[0]), int(numbers[1])]
    assert len(set(numbers.tolist())) == 2
    assert (numbers >= 0).all()
    assert torch.equal(numbers, ids((views, labels, ["a/0.png", "b/1.png"])))  # type: ignore[arg-type]
    assert torch.equal(ids((views, labels, torch.tensor([5, 6]))), torch.tensor([5, 6]))  # type: ignore[arg-type]
    assert ids((views, labels)) is None


def test_mmengines_sample_numbers_are_kept() -> None:
    from moco_mmengine.batches import ids_of
    from moco_mmengine.transforms import element_of

    samples = [element_of({"gt_label": 1, "sample_idx": number}) for number in (7, 9)]
    assert ids_of(samples) == [7, 9]
    assert ids_of([element_of({"gt_label": 1})]) is None
