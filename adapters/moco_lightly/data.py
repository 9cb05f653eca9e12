"""Data sets for lightly pipelines: those that moco-plugins knows by name, as lightly's ``LightlyDataset``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from moco_plugins import plugins

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
        picture = image if hasattr(image, "mode") else to_pil_image(image)
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
