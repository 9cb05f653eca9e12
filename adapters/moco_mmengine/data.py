"""Data sets by name for MMEngine's DataLoaders, so that a config needs neither mmcv nor mmpretrain."""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmengine.registry import TRANSFORMS
from torch.utils.data import Dataset

from moco_plugins.data.images import as_float
from moco_plugins.data.splits import to_learn_from
from moco_plugins.hooks import manager as plugins

from .transforms import element_of


class ImageDataset(Dataset[Any]):
    """A data set that moco-plugins knows by name, as ``dict(inputs=image, data_samples=...)`` or what a pipeline makes of it.

    ``dict(type='moco_plugins.mnist5k')`` is short for ``dict(type='moco_plugins.ImageDataset', name='mnist5k')``, and so for
    every name: ``moco_plugins.CIFAR10``, ``moco_plugins.ImageFolder``.

    Args:
        name: "mnist5k", "digits" (embedded), "cifar10" and others of torchvision, "imagefolder", or one of a plugin.
        split: "train", "test", or "train+test": for the metrics of this package, which take the training part as the
            bank or to train on, and the test part as queries. "pretrain": all images to learn from, which for STL-10 are
            more than have labels, else the training part.
        root: folder of the data; for "imagefolder", the folder of images.
        pipeline: transforms (configs or callables) of ``dict(img=, gt_label=, split=, sample_idx=)``.
        limit: use only the first so many images of each part.
    """

    def __init__(
        self,
        name: str,
        split: str = "train",
        root: str | os.PathLike[str] | None = None,
        pipeline: Sequence[Any] = (),
        limit: int | None = None,
    ) -> None:
        names = split.split("+")
        if set(names) - {"train", "test", "pretrain"}:
            raise ValueError(f"split={split!r} must be 'train', 'test', 'train+test' or 'pretrain'")
        train, test = plugins.dataset_factory(name)(root)
        found = {"train": train, "test": test, "pretrain": to_learn_from(train)}
        self.parts = [(part, found[part]) for part in names]
        sizes = [min(len(images), limit or len(images)) for _, images in self.parts]
        self.ends = list(itertools.accumulate(sizes))
        self.pipeline: list[Callable[[Any], Any]] = [
            TRANSFORMS.build(step) if isinstance(step, Mapping) else step for step in pipeline
        ]
        self.metainfo = {"classes": tuple(getattr(train, "classes", ()))}

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Any:
        part = bisect.bisect_right(self.ends, index)
        split, images = self.parts[part]
        image, label = images[index - (self.ends[part - 1] if part else 0)]
        sample: Any = {"img": image, "gt_label": label, "split": split, "sample_idx": index}
        for step in self.pipeline:
            sample = step(sample)
        if isinstance(sample, Mapping) and "inputs" not in sample:
            return {"inputs": as_float(sample["img"]), "data_samples": element_of(sample)}
        return sample
