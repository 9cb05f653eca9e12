"""Simple corruptions of images, in five strengths, and how far a probe may be believed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Strengths 1 to 5 in the manner of Hendrycks & Dietterich 2019 (arXiv:1903.12261) for small images: the deviation of the
# noise, that of the blur as a part of the shorter side, and the part of the contrast that is left.
_NOISE = (0.04, 0.06, 0.08, 0.12, 0.18)
_BLUR = (0.0125, 0.02, 0.03, 0.04, 0.055)
_CONTRAST = (0.75, 0.5, 0.4, 0.3, 0.15)


def noise(images: Tensor, strength: int, seed: int = 0) -> Tensor:
    """Add Gaussian noise, the same for the same seed and shape."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(images.shape, generator=generator).to(images.device)
    return (images + _NOISE[_place(strength)] * drawn).clamp(0, 1)


def blur(images: Tensor, strength: int, seed: int = 0) -> Tensor:
    """Blur with a Gaussian, in proportion to the shorter side."""
    sigma = _BLUR[_place(strength)] * min(images.shape[-2:])
    reach = min(max(1, round(3 * sigma)), min(images.shape[-2:]) - 1)
    kernel = torch.exp(-torch.arange(-reach, reach + 1, device=images.device).float().square() / (2 * sigma**2))
    kernel, channels = kernel / kernel.sum(), images.shape[1]
    padded = F.pad(images, (reach,) * 4, mode="reflect")
    rows = F.conv2d(padded, kernel.view(1, 1, 1, -1).expand(channels, -1, -1, -1), groups=channels)
    return F.conv2d(rows, kernel.view(1, 1, -1, 1).expand(channels, -1, -1, -1), groups=channels)


def contrast(images: Tensor, strength: int, seed: int = 0) -> Tensor:
    """Draw each image towards its mean."""
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + _CONTRAST[_place(strength)] * (images - mean)


#: Name -> (images (N, C, H, W) from 0 to 1, strength 1 to 5, seed) -> images of the same shape.
CORRUPTIONS: dict[str, Callable[[Tensor, int, int], Tensor]] = {"noise": noise, "blur": blur, "contrast": contrast}
STRENGTHS = (1, 2, 3, 4, 5)


def _place(strength: int) -> int:
    if strength not in STRENGTHS:
        raise ValueError(f"strength={strength} is not one of {', '.join(map(str, STRENGTHS))}")
    return strength - 1


def expected_calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """How far confidence and accuracy lie apart, 0 to 1 (Guo et al. 2017, arXiv:1706.04599, section 2).

    Predictions are put into bins of equal width by their confidence; the error is the mean distance of the bins' mean
    confidence from their accuracy, weighted by how many are in each.

    Args:
        probabilities: (N, classes), rows sum to 1.
        labels: (N,), from 0.
        bins: 15, as in the paper.

    Raises:
        ValueError: shapes that do not match, no rows, or fewer than one bin.
    """
    if probabilities.ndim != 2 or len(probabilities) == 0 or len(labels) != len(probabilities):
        raise ValueError(
            f"probabilities has shape {tuple(probabilities.shape)} and labels {len(labels)} entries; they must be (N, "
            "classes) and (N,) with N >= 1"
        )
    if bins < 1:
        raise ValueError(f"bins={bins} must be at least 1")
    confidence, predicted = probabilities.double().max(dim=1)
    right = (predicted == labels).double()
    place = (confidence * bins).ceil().long().clamp(1, bins) - 1  # (a, b], as in the paper
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, place.cpu(), (confidence - right).cpu())
    return float(gaps.abs().sum() / len(labels))
