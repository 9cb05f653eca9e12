"""Data sets for lightly pipelines: those that moco-plugins knows by name, as lightly's ``LightlyDataset``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from moco_plugins.data.images import resized
from moco_plugins.data.small_images import in_memory
from moco_plugins.data.splits import to_learn_from
from moco_plugins.hooks import manager as plugins
from moco_plugins.sizes import Size

from .frameworks import lightly


class Pictures(Dataset[Any]):
    """A data set that behaves like torchvision's: PIL images, and a ``transform`` that can be set.

    Args:
        images: a map-style data set of (image, label); images are PIL or tensors (C, H, W).
    """

    def __init__(self, images: Any) -> None:
        self.images = images
        self.transform: Callable[[Any], Any] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from torchvision.transforms.functional import to_pil_image

        image, label = self.images[index]
        picture = to_pil_image(image) if isinstance(image, Tensor) else image
        return (self.transform(picture) if self.transform else picture), label


def lightly_datasets(name: str, transform: Callable[[Any], Any] | None = None, root: Any = None) -> tuple[Any, Any]:
    """Return (train, test) of a data set by name, as ``lightly.data.LightlyDataset``: (image, label, file name).

    Args:
        name: as for ``moco-plugins bench --data``: "mnist5k", "cifar10", ...
        transform: makes two views of an image of the training set; the test set has none.
        root: folder of downloaded data.

    Raises:
        LookupError: no plugin provides that data set.
    """
    build = lightly("data").LightlyDataset.from_torch_dataset
    train, test = (Pictures(images) for images in plugins.dataset_factory(name)(root))
    return build(train, transform=transform), build(test)


class EvaluationImages:
    """A transform of images for evaluation: resized, cut to one size, scaled to [0, 1], normalised."""

    def __init__(self, image_size: Size | None, mean: Sequence[float], std: Sequence[float]) -> None:
        self.image_size, self.mean, self.std = image_size, tuple(mean), tuple(std)

    def __call__(self, image: Any) -> Tensor:
        """Return the image as a tensor (C, H, W)."""
        from torchvision.transforms.v2 import functional

        tensor = functional.to_dtype(functional.to_image(image), torch.float32, scale=True)
        tensor = resized(tensor, self.image_size) if self.image_size else tensor
        return functional.normalize(tensor, list(self.mean), list(self.std)) if self.mean else tensor


# Made a LightningDataModule by its subclasses, see moco_lightly.module.
_Base: Any = object


class TwoViewDataBody(_Base):
    """Training batches of two views, and two validation loaders, a bank and the images to classify, for online kNN.

    Args:
        data: a data set by name, see ``moco-plugins bench --data``.
        transform: image (PIL) -> two views: one of lightly's transforms, or :class:`moco_plugins.TwoViews`, whose views are
            made of whole batches, on the device: of arrays and folders of small images of one size all of it, of others what
            comes after the crop.
        batch_size: images of a process in one batch.
        root: folder of downloaded data.
        image_size: side of the evaluation images, or (height, width); None: as they are.
        mean, std: normalisation of the evaluation images; as ``transform`` does it. Empty for none.
        workers: processes that load data.
    """

    def __init__(
        self,
        data: str = "mnist5k",
        transform: Callable[[Any], Any] | None = None,
        batch_size: int = 256,
        root: str | None = None,
        image_size: Size | None = None,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        workers: int = 0,
    ) -> None:
        super().__init__()
        if transform is None:
            raise ValueError(
                "transform=None: name what makes the two views of a PIL image, such as lightly.transforms.MoCoV2Transform "
                "or moco_plugins.TwoViews"
            )
        self.data, self.root, self.batch_size, self.workers = data, root, batch_size, workers
        self.transform: Any = transform
        self.evaluation = EvaluationImages(image_size, mean, std)

    def setup(self, stage: str) -> None:
        """Load the data set."""
        train, test = plugins.dataset_factory(self.data)(self.root)
        build = lightly("data").LightlyDataset.from_torch_dataset
        images = to_learn_from(train)
        array = in_memory(images) if self._in_halves else None
        if array is not None:
            self.train = build(array)
        else:
            self.train = build(Pictures(images), transform=self.transform.crop if self._in_halves else self.transform)
        self.bank, self.test = Pictures(train), Pictures(test)
        self.bank.transform = self.test.transform = self.evaluation

    def train_dataloader(self) -> DataLoader[Any]:
        """Batches of (views, targets, file names)."""
        collate = None if self._in_halves else lightly("data.multi_view_collate").MultiViewCollate()
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=self.workers, collate_fn=collate)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Make the views of a training batch, or what is left to do of them, on the device."""
        if not self._in_halves or not self.trainer.training:
            return batch
        images, *rest = batch
        if isinstance(images, Tensor):
            return [list(self.transform(images)), *rest]
        return [[self.transform.finish(half, number) for number, half in enumerate(images)], *rest]

    @property
    def _in_halves(self) -> bool:
        return hasattr(self.transform, "crop") and hasattr(self.transform, "finish")

    def val_dataloader(self) -> list[DataLoader[Any]]:
        """Batches of (images, targets): the bank, then the images to classify."""
        return [DataLoader(part, 500, num_workers=self.workers) for part in (self.bank, self.test)]

    def test_dataloader(self) -> list[DataLoader[Any]]:
        """As for validation."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any]:
        """Batches of (images, targets) of the test set."""
        return self.val_dataloader()[1]
