"""Two views of an image: the augmentations of MoCo v1, v2 and v3, one image at a time or a batch at once.

Images may be PIL or tensors (C, H, W) of any channel count, 8 or 16 bit or float in [0, 1]; views are float32 tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...sizes import Size, sides
from .colour import per_channel
from .draws import draw_crop, draw_crops, draw_look, draw_looks
from .images import pixels, readable, size_of_image, to_float
from .recipes import Recipe, Transform, local_recipe, recipes
from .render import joined, render, render_one
from .space import resized_crop

#: ImageNet's channel means and standard deviations, as in all of the authors' code.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class TwoViews:
    """Make the two views of an image that MoCo contrasts: image -> (view_q, view_k), each (C, height, width), float32.

    A tensor (N, C, H, W) is a batch: each of its images gets random parameters of its own, and two batches of views come
    back, computed where the images are. Photographs of different sizes are best cut out one by one, in the processes
    that load them (:meth:`crop`), and handed on as bytes; the rest is done to the batch (:meth:`finish`).

    Colour jitter of hue and saturation and the conversion to grey are left out where an image is not RGB. Random numbers
    come from torch's default generator of the CPU, so that a seed gives the same views on every device.

    Args:
        variant: "v1" (arXiv:1911.05722, section 3.3), "v2" and "v2+" (arXiv:2003.04297, section 3), "v3"
            (arXiv:2104.02057, section 4.1: BYOL's, where the two views differ in blur and solarisation).
        image_size: side of a view, or (height, width); 224.
        min_scale: smallest area of the crop, as a fraction; 0.2, v3: 0.08.
        mean, std: normalisation per channel; ImageNet's for RGB, none for others. ``()`` for none.
        local_views: small crops of each image besides, for methods with multi-crop (MoCo, SwAV, DINO); 0. Six in SwAV
            (arXiv:2006.09882) and eight in DINO; they follow the two views.
        local_size: their side, or (height, width); 96.
        local_scale: their areas, as fractions; from 0.05 to ``min_scale``.

    Attributes:
        recipes: what each view is drawn from, see :class:`moco_plugins.core.views.recipes.Recipe`; may be changed.

    Raises:
        ValueError, TypeError: an unknown variant, a size below 1, or statistics that do not fit.
    """

    #: A batch may be given.
    batched = True

    def __init__(
        self,
        variant: str = "v2",
        image_size: Size = 224,
        min_scale: float | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        local_views: int = 0,
        local_size: Size = 96,
        local_scale: tuple[float, float] | None = None,
    ) -> None:
        large, small = sides("image_size", image_size), sides("local_size", local_size)
        self.recipes: tuple[Recipe, ...] = recipes(variant, large, min_scale)
        if local_views < 0:
            raise ValueError(f"local_views={local_views} must be 0 (none) or more; 6 in SwAV")
        if local_views and small[0] * small[1] >= large[0] * large[1]:
            raise ValueError(f"local_size={local_size} must be smaller than image_size={image_size}")
        self.recipes += (local_recipe(self.recipes[0], small, local_scale),) * local_views
        _check_statistics(mean, std)
        self.variant, self.image_size = variant, image_size
        self.mean, self.std = mean, std

    def __call__(self, image: Any) -> tuple[Tensor, ...]:
        """Return the views of a PIL image or tensor (C, H, W), or of a batch (N, C, H, W): two, then the local ones.

        Raises:
            ValueError, TypeError: it is no image, or an empty one, or its channels do not fit ``mean``.
        """
        if isinstance(image, Tensor) and image.ndim == 4:
            return self._views_of_batch(image)
        views = self.crop(image)
        return tuple(
            render_one(view, recipe, draw_look(recipe), self._normalise)
            for view, recipe in zip(views, self.recipes, strict=True)
        )

    @property
    def transforms(self) -> tuple[list[Transform], ...]:
        """The same views as torchvision's transforms of an RGB image, to look at; what is changed is ``recipes``."""
        return tuple(recipe.torchvision() for recipe in self.recipes)

    def crop(self, image: Any) -> tuple[Tensor, ...]:
        """Cut the views out of one image, resize and flip them: the first half of making views.

        Returns:
            (C, height, width) each: uint8 of 8-bit images, else float32 from 0 to 1.
        """
        image = readable(image)
        height, width = size_of_image(image)
        found = []
        for recipe in self.recipes:
            top, left, tall, wide, flip = draw_crop(recipe, height, width)
            part = pixels(image, top, left, tall, wide)
            view = resized_crop(part, recipe.size)
            found.append(view.flip(-1) if flip else view)
        return tuple(found)

    def finish(self, views: Tensor, view: int = 0) -> Tensor:
        """Colour, blur and normalise a batch of what :meth:`crop` has cut out: (N, C, H, W) -> float32, on its device.

        Args:
            views: uint8, or float from 0 to 1.
            view: which of the views these are, from 0; matters where they differ, as in v3.

        Raises:
            ValueError: no batch, an empty one, or a number that no view has.
        """
        if not 0 <= view < len(self.recipes):
            raise ValueError(f"view={view} must be the number of a view, 0 to {len(self.recipes) - 1}")
        views, recipe = _batch(views), self.recipes[view]
        return render(views, recipe, draw_looks(recipe, len(views)), normalise=self._normalise)

    def _views_of_batch(self, images: Tensor) -> tuple[Tensor, ...]:
        images = _batch(images)
        n, _, height, width = images.shape
        found: list[Tensor] = []
        for group in (self.recipes[:2], self.recipes[2:]):  # of one size each
            if group:
                crops = joined([draw_crops(recipe, n, height, width) for recipe in group])
                looks = joined([draw_looks(recipe, n) for recipe in group])
                found += render(images, group[0], looks, crops, self._normalise).split(n)
        return tuple(found)

    def _normalise(self, planes: Tensor) -> None:
        mean, std = self.mean, self.std
        if mean is None or std is None:
            mean, std = (IMAGENET_MEAN, IMAGENET_STD) if len(planes) == 3 else ((), ())
        if not mean:
            return
        if len(mean) not in (1, len(planes)):
            raise ValueError(
                f"mean has {len(mean)} values and the image {len(planes)} channels; give one value a channel, or one for all"
            )
        planes.sub_(per_channel(tuple(mean), planes.device)).div_(per_channel(tuple(std or ()), planes.device))

    def __repr__(self) -> str:
        return f"TwoViews(variant={self.variant!r}, image_size={self.image_size})"


def _batch(images: Tensor) -> Tensor:
    if not isinstance(images, Tensor) or images.ndim != 4 or images.numel() == 0:
        what = f"has shape {tuple(images.shape)}" if isinstance(images, Tensor) else f"is a {type(images).__name__}"
        raise ValueError(f"the batch {what}; it must be a tensor (N, C, H, W) of at least one image")
    return images if images.dtype == torch.uint8 else to_float(images)


def _check_statistics(mean: Sequence[float] | None, std: Sequence[float] | None) -> None:
    if mean is None and std is None:
        return
    if mean is None or std is None:
        raise ValueError(f"mean={mean!r} and std={std!r} go together: give both, or neither")
    if len(mean) != len(std):
        raise ValueError(f"mean has {len(mean)} values and std {len(std)}; give as many of each, one a channel")
    if any(not value > 0 for value in std):
        raise ValueError(f"std={std!r} must be greater than 0")
