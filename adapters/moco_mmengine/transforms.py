"""Two views as the last transform of an MMEngine pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from mmengine.structures import BaseDataElement
from torch import Tensor

from moco_plugins.data.opening import read_image
from moco_plugins.hooks import manager as plugins
from moco_plugins.sizes import Size


class TwoViews:
    """Make two views of a sample: ``dict(img=...)`` or ``dict(img_path=...)`` -> ``dict(inputs=[view_q, view_k], ...)``.

    It ends a pipeline, and takes the place of mmpretrain's ``MultiView`` and ``PackInputs``. Called with an image instead
    of a dict it returns the two views, so that a data preprocessor can use it as well.

    Args:
        variant: a name of views: "v1", "v2", "v3" (the papers), "affine", or one that a plugin brings.
        image_size: side of a view, or (height, width).
        to_rgb: the image is BGR, as mmcv's LoadImageFromFile gives it.
        finish: False: the views are only cut out, as bytes; colours, blur and normalisation are left to
            ``moco_plugins.DataPreprocessor(views=...)``, which does them to the whole batch, on the device.
        options: of these views, such as ``mean`` and ``std``.
    """

    def __init__(
        self, variant: str = "v2", image_size: Size = 224, to_rgb: bool = False, finish: bool = True, **options: Any
    ) -> None:
        self.views = plugins.build_views(variant, image_size, options)
        self.to_rgb = to_rgb
        self.make: Any = self.views if finish else getattr(self.views, "crop", None)
        if self.make is None:
            raise ValueError(f"finish=False: the views {variant!r} are not made in two halves; leave it out")
        self.unfinished = not finish
        self.batched = bool(getattr(self.views, "batched", False))

    def __call__(self, sample: Any) -> Any:
        """Return the packed sample, or of an image its two views."""
        if not isinstance(sample, Mapping):
            return self.views(sample)
        element = element_of(sample)
        if self.unfinished:
            element.set_metainfo({"unfinished": True})
        return {"inputs": list(self.make(image_of(sample, self.to_rgb))), "data_samples": element}

    @property
    def finish(self) -> Callable[[Tensor, int], Tensor]:
        """What is left to do to a batch of views that were only cut out; see :meth:`moco_plugins.TwoViews.finish`."""
        return self.views.finish  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.views!r})"


def image_of(sample: Mapping[str, Any], to_rgb: bool = False) -> Any:
    """Return the image of a sample: PIL, or a tensor (C, H, W)."""
    image = sample.get("img")
    if image is None and "img_path" in sample:
        return read_image(sample["img_path"])
    if image is None:
        raise TypeError(f"the sample has {', '.join(map(repr, sample))}; it needs 'img' or 'img_path'")
    if isinstance(image, np.ndarray):
        planes = image[None] if image.ndim == 2 else image.transpose(2, 0, 1)
        image = torch.from_numpy(np.ascontiguousarray(planes))
        return image.flip(0) if to_rgb and image.shape[0] == 3 else image
    return image


def element_of(sample: Mapping[str, Any]) -> BaseDataElement:
    """Return what is known of a sample besides its image: its label, the part of the data it is from, its number there."""
    label = sample.get("gt_label")
    number = {"sample_idx": int(sample["sample_idx"])} if sample.get("sample_idx") is not None else {}
    return BaseDataElement(gt_label=-1 if label is None else int(label), split=str(sample.get("split", "")), **number)
