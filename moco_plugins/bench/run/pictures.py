"""Pictures that need the images or features themselves; drawn while the comparison runs, kept beside the results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...data.images import as_batch
from ...data.loader import Place, ViewPairs
from ...data.seeding import key
from ...sizes import as_size, at_most
from ..plan.data import Data
from ..plan.runs import file_name
from ..plan.settings import Settings
from ..report import style
from .recipe import build_views, views_name

VIEWS, VIEWS_OF, NEIGHBOURS, PROJECTION = "views.png", "views-{}.png", "neighbours-{}.png", "projection-{}.png"
_GAP = 2  # white pixels between tiles


def draw_views(settings: Settings, data: Data, folder: Path, count: int = 10) -> list[Path]:
    """Some images, and the two views of each: rows original, query view, key view. One picture for each kind of views."""
    methods: dict[str, str] = {}
    for method in settings.methods:
        methods.setdefault(views_name(settings, method), method)
    drawn = []
    for name, method in methods.items():
        path = folder / (VIEWS if len(methods) == 1 else VIEWS_OF.format(file_name(name)))
        if not path.exists():
            _draw_views(settings, data, method, path, count)
        drawn.append(path)
    return drawn


def _draw_views(settings: Settings, data: Data, method: str, path: Path, count: int) -> None:
    images = data.pretrain
    chosen = torch.linspace(0, len(images) - 1, count).long().tolist()
    views = ViewPairs(images, build_views(settings, method), lambda batch: batch, key(0, "data"))
    (first, second, *_), _, _ = views.__getitems__(Place(chosen, 0, 0, 0))
    originals, _ = as_batch(images, chosen, as_size(*first.shape[2:]))
    save_grid([originals, first, second], path, ["image", "query view", "key view"])


def draw_features(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], data: Data, label: str, folder: Path
) -> None:
    """The pictures of one method's features: nearest neighbours and a map."""
    draw_neighbours(train, test, data, label, folder)
    if data.labelled and data.measure == "top1":
        draw_projection(test, data.classes, label, folder)
    else:
        draw_thumbnails(test[0], data, label, folder)


def draw_neighbours(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], data: Data, label: str, folder: Path, count: int = 10
) -> Path:
    """Some test images (left) and their nearest training images by the features; a frame where the class is wrong."""
    chosen = torch.linspace(0, len(test[0]) - 1, min(count, len(test[0]))).long()
    cosine = F.normalize(test[0][chosen], dim=1) @ F.normalize(train[0], dim=1).T
    nearest = cosine.topk(min(4, len(train[0])), dim=1).indices
    size = at_most(data.image_size, 96)
    queries, _ = as_batch(data.test, chosen.tolist(), size)
    columns = [queries, *(as_batch(data.train, column.tolist(), size)[0] for column in nearest.T)]
    truth = test[1][chosen]
    wrong = [[False] * len(chosen), *((train[1][column] != truth).tolist() for column in nearest.T)]
    return save_grid(
        columns,
        folder / NEIGHBOURS.format(file_name(label)),
        ["test image", *[f"{nth} nearest" for nth in ("1st", "2nd", "3rd", "4th")][: nearest.shape[1]]],
        wrong if truth.ndim == 1 else None,
    )


def save_grid(
    rows: Sequence[Tensor], path: Path, names: Sequence[str], framed: Sequence[Sequence[bool]] | None = None
) -> Path:
    """Write rows of images (N, C, H, W), 0 to 1, as one picture, each row with its name."""
    size = rows[0].shape[-1]
    zoom = max(1, round(56 / size))
    made, axes = style.figure(width=7.2, height=0.1 + 0.66 * len(rows))
    tiles = [_tiles(row, zoom, framed[i] if framed else None) for i, row in enumerate(rows)]
    axes.imshow(torch.cat(tiles, dim=0).numpy(), interpolation="nearest")
    side = tiles[0].shape[0]
    axes.set_yticks([side * (i + 0.5) for i in range(len(names))], names)
    axes.set_xticks([])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return style.save(made, path)


def _tiles(images: Tensor, zoom: int, framed: Sequence[bool] | None) -> Tensor:
    """Images side by side, (H, W, 3)."""
    images = images.clamp(0, 1)
    images = images.expand(-1, 3, -1, -1) if images.shape[1] == 1 else images[:, :3]
    images = images.repeat_interleave(zoom, 2).repeat_interleave(zoom, 3).clone()
    for i, frame in enumerate(framed or ()):
        if frame:
            red = torch.tensor([0.84, 0.37, 0.0])[:, None, None]
            width = max(2, images.shape[-1] // 14)
            inner = images[i, :, width:-width, width:-width].clone()
            images[i] = red
            images[i, :, width:-width, width:-width] = inner
    padded = F.pad(images, (_GAP, _GAP, _GAP, _GAP), value=1.0)
    return torch.cat(list(padded), dim=2).permute(1, 2, 0)


def _placed(features: Tensor) -> Any:
    """Places in the plane for features (N, D): t-SNE, started from the principal components; an array (N, 2)."""
    from sklearn.manifold import TSNE

    perplexity = max(2.0, min(30.0, (len(features) - 1) / 3))
    # Squared distances of unit vectors grow with the angle; t-SNE on them with a fixed seed gives the same map again.
    made = TSNE(2, init="pca", random_state=0, perplexity=perplexity, max_iter=400)
    return made.fit_transform(F.normalize(features, dim=1).numpy())


def draw_thumbnails(features: Tensor, data: Data, label: str, folder: Path, most: int = 120) -> Path:
    """A 2-D map of the features of some test images without classes: the images themselves, where their features lie."""
    from matplotlib.offsetbox import AnnotationBbox, OffsetImage

    rows = torch.linspace(0, len(features) - 1, min(most, len(features))).long()
    points = _placed(features[rows])
    images, _ = as_batch(data.test, rows.tolist(), at_most(data.image_size, 64))
    made, axes = style.figure(width=7.2, height=6.0)
    axes.plot(points[:, 0], points[:, 1], "o", alpha=0)
    for image, point in zip(images, points, strict=True):
        tile = image.expand(3, -1, -1) if image.shape[0] == 1 else image[:3]
        picture = OffsetImage(
            tile.clamp(0, 1).permute(1, 2, 0).numpy(), zoom=24 / image.shape[-1], interpolation="nearest"
        )
        placed = AnnotationBbox(picture, point, frameon=False, pad=0)
        placed.set_in_layout(False)
        axes.add_artist(placed)
    axes.set_axis_off()
    return style.save(made, folder / PROJECTION.format(file_name(label)))


def draw_projection(test: tuple[Tensor, Tensor], classes: Sequence[str], label: str, folder: Path) -> Path:
    """A 2-D map of the features of some test images, coloured by class."""
    rows = torch.linspace(0, len(test[0]) - 1, min(500, len(test[0]))).long()
    points, labels = _placed(test[0][rows]), test[1][rows]
    made, axes = style.figure(height=4.2)
    for number in torch.unique(labels).tolist()[:20]:
        own = points[(labels == number).numpy()]
        colour = _class_colour(number)
        axes.plot(own[:, 0], own[:, 1], "o", color=colour, ms=3.2, alpha=0.7, mew=0)
        name = classes[number] if 0 <= number < len(classes) else ""
        middle = own[((own - own.mean(0)) ** 2).sum(1).argmin()]
        axes.annotate(
            name, middle, color="white", fontsize=9, fontweight="bold", ha="center", va="center",
            bbox={"boxstyle": "round,pad=0.25", "fc": colour, "ec": "white", "lw": 0.8},
        )  # fmt: skip
    axes.set_axis_off()
    axes.set_aspect("equal")
    return style.save(made, folder / PROJECTION.format(file_name(label)))


def _class_colour(number: int) -> Any:
    import matplotlib

    return matplotlib.colormaps["tab20"]((number % 10) * 2 / 20 + (number // 10 % 2) / 20)
