"""What the views of MoCo v1, v2 and v3 are drawn from: ranges and probabilities, with their sources."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Transform = Callable[[Any], Any]
VARIANTS = ("v1", "v2", "v2+", "v3")


@dataclass(frozen=True)
class Recipe:
    """One view: random crop, colour jitter, grey, blur, solarisation, flip; in this order, each with a probability.

    Args:
        size: (height, width) of the view, pixels.
        scale: area of the crop, as fractions of the image's.
        ratio: its width / height.
        jitter: strengths of brightness, contrast, saturation (factors 1 - s to 1 + s) and hue (turns, -s to s).
        jitter_p, grey_p, blur_p, solarise_p, flip_p: probabilities.
        grey_first: grey comes before the jitter (v1).
        sigma: standard deviations of the blur, pixels.
        kernel: its width, odd, pixels.
        threshold: what is at least as bright is turned over by solarisation, of 1.
    """

    size: tuple[int, int]
    scale: tuple[float, float]
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    jitter_p: float = 0.8
    grey_p: float = 0.2
    grey_first: bool = False
    blur_p: float = 0.5
    sigma: tuple[float, float] = (0.1, 2.0)
    kernel: int = 3
    solarise_p: float = 0.0
    threshold: float = 128 / 255
    flip_p: float = 0.5

    def torchvision(self) -> list[Transform]:
        """The same view as torchvision's transforms of an RGB image: to look at, and to compare with."""
        from torchvision.transforms import v2

        def sometimes(transform: Transform, p: float) -> list[Transform]:
            return [] if p == 0 else [transform] if p == 1 else [v2.RandomApply([transform], p=p)]

        jitter = sometimes(v2.ColorJitter(*self.jitter), self.jitter_p)
        grey = [v2.RandomGrayscale(p=self.grey_p)] if self.grey_p else []
        return [
            v2.RandomResizedCrop(self.size, self.scale, self.ratio, antialias=True),
            *(grey + jitter if self.grey_first else jitter + grey),
            *sometimes(v2.GaussianBlur(self.kernel, sigma=self.sigma), self.blur_p),
            *([v2.RandomSolarize(threshold=self.threshold, p=self.solarise_p)] if self.solarise_p else []),
            *([v2.RandomHorizontalFlip(self.flip_p)] if self.flip_p else []),
        ]


def recipes(variant: str, size: tuple[int, int], min_scale: float | None) -> tuple[Recipe, Recipe]:
    """The recipes of the two views of a variant.

    "v1": arXiv:1911.05722, section 3.3. "v2" and "v2+": arXiv:2003.04297, section 3. "v3": arXiv:2104.02057, section 4.1,
    which takes BYOL's (arXiv:2006.07733, appendix B, table 6), where the two views differ in blur and solarisation.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant={variant!r} is not one of {', '.join(VARIANTS)}")
    if min_scale is not None and not 0 < min_scale <= 1:
        raise ValueError(f"min_scale={min_scale} must lie in (0, 1]: it is a fraction of the image's area")
    smallest = min_scale if min_scale is not None else (0.08 if variant == "v3" else 0.2)
    base = Recipe(size, (smallest, 1.0), kernel=_kernel(size))
    if variant == "v1":
        base = replace(base, jitter=(0.4, 0.4, 0.4, 0.4), jitter_p=1.0, blur_p=0.0, grey_first=True)
    if variant != "v3":
        return base, base
    base = replace(base, jitter=(0.4, 0.4, 0.2, 0.1))
    return replace(base, blur_p=1.0), replace(base, blur_p=0.1, solarise_p=0.2)


def local_recipe(base: Recipe, size: tuple[int, int], scale: tuple[float, float] | None) -> Recipe:
    """The recipe of the local crops of multi-crop: as ``base``, but small, and of small parts.

    They take over where the two large views end: from 0.05 of the area to their smallest (SwAV, arXiv:2006.09882, appendix
    A: 0.05 to 0.14 and 0.14 to 1; DINO, arXiv:2104.14294: 0.05 to 0.4 and 0.4 to 1). Blur has probability 0.5, and nothing
    is solarised.

    Raises:
        ValueError: ``scale`` is no range of fractions.
    """
    scale = scale if scale is not None else (min(0.05, base.scale[0]), base.scale[0])
    if not 0 < scale[0] <= scale[1] <= 1:
        raise ValueError(
            f"local_scale={scale!r} must be (smallest, largest) fractions of the image's area, within (0, 1]"
        )
    blur_p = min(base.blur_p, 0.5)
    return replace(base, size=size, scale=scale, kernel=_kernel(size), blur_p=blur_p, solarise_p=0.0)


def _kernel(size: tuple[int, int]) -> int:
    """The width of a blur, a tenth of the view, odd: 23 at 224 (SimCLR, arXiv:2002.05709, appendix A)."""
    return max(3, int(0.1 * min(size)) // 2 * 2 + 1)
