"""Two views as the last transform of an MMEngine pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from mmengine.structures import BaseDataElement

from moco_plugins.hooks import manager as plugins


class TwoViews:
    """Make two views of a sample: ``dict(img=...)`` or ``dict(img_path=...)`` -> ``dict(inputs=[view_q, view_k], ...)``.

    It ends a pipeline, and takes the place of mmpretrain's ``MultiView`` and ``PackInputs``. Called with an image instead
    of a dict it returns the two views, so that a data preprocessor can use it as well.

    Args:
        variant: a name of views: "v1", "v2", "v3" (the papers), "affine", or one that a plugin brings.
        image_size: side of a view.
        to_rgb: the image is BGR, as mmcv's LoadImageFromFile gives it.
        options: of these views, such as ``mean`` and ``std``.
    """

    def __init__(self, variant: str = "v2", image_size: int = 224, to_rgb: bool = False, **options: Any) -> None:
        self.views = plugins.build_views(variant, image_size, options)
        self.to_rgb = to_rgb
        self.batched = bool(getattr(self.views, "batched", False))

    def __call__(self, sample: Any) -> Any:
        """Return the packed sample, or of an image its two views."""
        if not isinstance(sample, Mapping):
            return self.views(sample)
        return {"inputs": list(self.views(image_of(sample, self.to_rgb))), "data_samples": element_of(sample)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.views!r})"


def image_of(sample: Mapping[str, Any], to_rgb: bool = False) -> Any:
    """Return the image of a sample: PIL, or a tensor (C, H, W)."""
    image = sample.get("img")
    if image is None and "img_path" in sample:
        from PIL import Image

        with Image.open(sample["img_path"]) as file:
            return file.convert("RGB")
    if image is None:
        raise TypeError(f"the sample has {', '.join(map(repr, sample))}; it needs 'img' or 'img_path'")
    if isinstance(image, np.ndarray):
        planes = image[None] if image.ndim == 2 else image.transpose(2, 0, 1)
        image = torch.from_numpy(np.ascontiguousarray(planes))
        return image.flip(0) if to_rgb and image.shape[0] == 3 else image
    return image


def element_of(sample: Mapping[str, Any]) -> BaseDataElement:
    """Return what is known of a sample besides its image: its label and the part of the data it is from."""
    label = sample.get("gt_label")
    return BaseDataElement(gt_label=-1 if label is None else int(label), split=str(sample.get("split", "")))
