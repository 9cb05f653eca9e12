"""What ``moco-plugins speed`` compares of views: ours, torchvision's transforms and those of the adapters' libraries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..core.views import IMAGENET_MEAN, IMAGENET_STD, TwoViews
from ..hooks import manager as plugins


def view_contenders(size: int, source: tuple[int, int], count: int, device: str) -> dict[str, Callable[[], object]]:
    """Make MoCo v2's two views of ``count`` PIL images of one size, in several ways; the first is how training does it.

    Small images are made as one batch; larger ones are cut out one by one and finished together.

    Args:
        size: side of the views. source: (height, width) of the images.
        device: where batches are, besides the CPU.
    """
    from PIL import Image
    from torchvision.transforms import v2

    noise = np.random.default_rng(0)
    coarse = [
        noise.integers(0, 256, (source[0] // 16 + 1, source[1] // 16 + 1, 3), dtype=np.uint8) for _ in range(count)
    ]
    images = [Image.fromarray(part).resize(source[::-1], Image.Resampling.BICUBIC) for part in coarse]
    batch = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])
    ours = TwoViews("v2", size)
    plain = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(IMAGENET_MEAN), list(IMAGENET_STD))]
    theirs = v2.Compose([*ours.recipes[0].torchvision(), *plain])

    def halves(place: str = "cpu") -> None:
        for number, half in enumerate(zip(*(ours.crop(image) for image in images), strict=True)):
            ours.finish(torch.stack(half).to(place), number)

    def each(transform: Callable[..., object]) -> Callable[[], object]:
        return lambda: [transform(image) for image in images]

    crops = [torch.stack(half) for half in zip(*(ours.crop(image) for image in images), strict=True)]
    contenders: dict[str, Callable[[], object]] = (
        {"batched": lambda: ours(batch)} if size <= 64 else {"crop, finish": halves}
    )
    contenders["one by one"] = each(ours)
    contenders["torchvision.transforms.v2"] = each(lambda image: (theirs(image), theirs(image)))
    for _, adapter in plugins.adapters().values():
        build = adapter.baselines.get("views")
        if build is not None and (rival := build(size)) is not None:
            contenders[adapter.framework] = each(rival)
    if device != "cpu":
        there, halves_there = batch.to(device), [half.to(device) for half in crops]
        contenders[f"batched, {device}"] = lambda: ours(there)
        contenders[f"finish, {device}"] = lambda: [
            ours.finish(half, number) for number, half in enumerate(halves_there)
        ]
    return contenders
