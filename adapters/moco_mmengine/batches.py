"""Batches: what comes out of a DataLoader is brought into the form the model takes, or it is said what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor
from mmengine.registry import TRANSFORMS
from torch import Tensor

from moco_plugins.core.checks import local_crops

_CURES = (
    "Training needs two views of each image. Add dict(type='moco_plugins.TwoViews', variant='v2', image_size=224) as the "
    "last transform of train_dataloader.dataset.pipeline, or views=dict(type='moco_plugins.TwoViews', ...) to the "
    "data_preprocessor, which makes them of the whole batch"
)


class DataPreprocessor(BaseDataPreprocessor):
    """Stack, move and normalise a batch; where asked for, make the two views of it on the device.

    Takes ``dict(inputs=..., data_samples=...)`` or ``(inputs, labels)``, from any of MMEngine's or torch's collate
    functions, with ``inputs`` either images or two views of them, stacked or not. "Images" are (C, H, W), or whatever the
    backbone takes: volumes, clips, signals.

    Args:
        mean, std: normalisation per channel, for images from 0 to 1 (uint8 images are brought there); None: none.
        views: a transform config, in training only: the views are made of a whole batch of images at once, on the device;
            of views that were cut out one by one (``TwoViews(..., finish=False)`` in the pipeline, for photographs of
            different sizes) the rest is done. ``dict(type='moco_plugins.TwoViews', variant='v2', image_size=32)``.
        non_blocking: see MMEngine's BaseDataPreprocessor.
    """

    mean: Tensor | None
    std: Tensor | None

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        views: Any = None,
        non_blocking: bool = False,
    ) -> None:
        super().__init__(non_blocking)
        if (mean is None) != (std is None):
            raise ValueError(f"mean={mean!r} and std={std!r} go together: give both, or neither")
        if mean is not None and max(mean) > 2:
            ours = [round(value / 255, 4) for value in mean]
            raise ValueError(f"mean={list(mean)!r} is for images from 0 to 255, here they are from 0 to 1: mean={ours}")
        for name, values in (("mean", mean), ("std", std)):
            tensor = None if values is None else torch.tensor(list(values))
            self.register_buffer(name, tensor, persistent=False)
        self.views = TRANSFORMS.build(views) if isinstance(views, Mapping) else views

    def forward(self, data: Any, training: bool = False) -> dict[str, Any]:
        """Return ``dict(inputs=images or [view_q, view_k], data_samples=...)``."""
        inputs, samples = split_batch(data)
        inputs = self.cast_data(stack(inputs, samples, two=training and self.views is None))
        if training and self.views is not None and isinstance(inputs, Tensor):
            inputs = make_views(self.views, inputs)
        elif _unfinished(samples):
            inputs = self._finished(inputs)
        batches = [self._finish(view) for view in inputs] if isinstance(inputs, list) else self._finish(inputs)
        return {"inputs": batches, "data_samples": self.cast_data(samples)}

    def _finished(self, crops: Tensor | list[Tensor]) -> list[Tensor]:
        if self.views is None or not hasattr(self.views, "finish"):
            raise ValueError(
                "the views of the batch are only cut out (finish=False); give the data_preprocessor the same "
                "views=dict(type='moco_plugins.TwoViews', ...), or leave out finish=False"
            )
        return [self.views.finish(half, number) for number, half in enumerate(crops)]

    def _finish(self, images: Any) -> Any:
        if isinstance(images, Mapping):  # no image: as the backbone takes it
            return images
        images = as_float(images)
        if self.mean is None or self.std is None:
            return images
        shape = (-1,) + (1,) * (images.ndim - 2)  # C x 1 x 1 for images, with as many 1 as they have places
        return (images - self.mean.view(shape)) / self.std.view(shape)


class PerView(BaseDataPreprocessor):
    """Somebody else's preprocessor, which takes one view, called for each of two.

    MMEngine's ``ImgDataPreprocessor`` and those that are made of it in other projects (mmpretrain, mmdet) are such.

    Args:
        inner: the preprocessor.
    """

    def __init__(self, inner: BaseDataPreprocessor) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, data: Any, training: bool = False) -> Any:
        """Return what ``inner`` returns, with ``inputs`` a list of two where there are two views."""
        inputs, samples = split_batch(data)
        parts = stack(inputs, samples, two=training)
        if isinstance(parts, Tensor):
            return self._call(parts, samples, training)
        results = [self._call(part, samples, training) for part in parts]
        return {**results[0], "inputs": [result["inputs"] for result in results]}

    def _call(self, images: Tensor, samples: Any, training: bool) -> dict[str, Any]:
        result: dict[str, Any] = self.inner({"inputs": images, "data_samples": samples}, training)
        inputs = result["inputs"]
        return {**result, "inputs": inputs[0]} if isinstance(inputs, (list, tuple)) and len(inputs) == 1 else result


def as_float(images: Tensor) -> Tensor:
    """Whole numbers become floats from 0 to 1."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


def make_views(transform: Any, images: Tensor) -> list[Tensor]:
    """Return both views of a batch; a transform that is not batched takes the images one by one."""
    if getattr(transform, "batched", False):
        return list(transform(images))
    pairs = [transform(image) for image in as_float(images)]
    return [torch.stack(list(view)) for view in zip(*pairs, strict=True)]


def _unfinished(samples: Any) -> bool:
    return isinstance(samples, (list, tuple)) and len(samples) > 0 and bool(_field(samples[0], "unfinished", False))


def split_batch(data: Any) -> tuple[Any, Any]:
    """Return (inputs, data_samples) of a batch."""
    if isinstance(data, Mapping):
        if "inputs" not in data:
            raise TypeError(
                f"the batch is a dict with {', '.join(map(repr, data))}, without 'inputs'; let the pipeline end with "
                "moco_plugins.TwoViews or mmpretrain's PackInputs"
            )
        return data["inputs"], data.get("data_samples")
    if isinstance(data, Tensor):
        return data, None
    if isinstance(data, (list, tuple)) and data:
        if isinstance(data[0], (Mapping, tuple)) and len(data) > 2:
            raise TypeError(
                f"the batch is a list of {len(data)} samples that nobody has collated; set train_dataloader.collate_fn="
                "dict(type='default_collate')"
            )
        if len(data) == 2 and not _images(data[1]):
            return data[0], data[1]
        return (data[0], None) if len(data) == 1 else (list(data), None)
    raise TypeError(
        f"the batch is a {type(data).__name__}; it must be dict(inputs=..., data_samples=...) or (inputs, labels)"
    )


def _images(part: Any) -> bool:
    if isinstance(part, Tensor):
        return part.ndim >= 3
    return isinstance(part, (list, tuple)) and len(part) > 0 and isinstance(part[0], Tensor) and part[0].ndim >= 3


def stack(inputs: Any, samples: Any = None, two: bool = False) -> Tensor | list[Tensor]:
    """Return images (N, ...), or a list of such, one for each view.

    Args:
        inputs: as a collate function leaves them: stacked or a list of images; or a list of such, one for each view.
        samples: what is known of the images; their number tells whether two tensors are two views or two images.
        two: there must be two views. Where nothing else tells, tensors of three dimensions are images.
    """
    if isinstance(inputs, Tensor):
        return inputs
    if not isinstance(inputs, (list, tuple)) or not inputs:
        raise TypeError(f"inputs is a {type(inputs).__name__}; it must be a tensor, or a list of tensors. {_CURES}")
    first = inputs[0]
    if isinstance(first, Tensor):
        count = len(samples) if isinstance(samples, (list, tuple, Tensor)) else None
        if len(inputs) == 2 and (two or count not in (2, None)):
            return list(inputs)
        return _stack(inputs) if first.ndim == 3 or (not two and len(inputs) == count) else list(inputs)
    if isinstance(first, (list, tuple)):
        return [_stack(view) for view in inputs]
    if two and _nested(inputs):
        return list(inputs)
    raise TypeError(
        f"inputs holds {type(first).__name__}, not tensors; let the pipeline end with moco_plugins.TwoViews, or with a "
        f"transform that makes tensors (mmpretrain's PackInputs). {_CURES}"
    )


def _stack(images: Any) -> Tensor:
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        some = ", ".join(map(str, sorted(shapes)[:3]))
        raise ValueError(f"the images of the batch have different shapes ({some}); crop or resize them to one size")
    return torch.stack(list(images))


def check_views(inputs: Any) -> list[Tensor]:
    """Return the two views of a training batch, and any local crops, or raise an error that says what to add."""
    if isinstance(inputs, Tensor):
        if inputs.ndim == 5 and inputs.shape[1] == 2:
            return [inputs[:, 0], inputs[:, 1]]
        raise TypeError(f"inputs is one tensor of shape {tuple(inputs.shape)}: one view. {_CURES}")
    if not isinstance(inputs, (list, tuple)):
        raise TypeError(f"inputs is a {type(inputs).__name__}. {_CURES}")
    if len(inputs) == 2 and all(isinstance(view, (list, tuple)) and _tensors(view) for view in inputs):
        inputs = [as_float(_stack(view)) for view in inputs]  # a preprocessor that only moves has left them so
    if _nested(inputs):
        return list(inputs)
    two = inputs[: len(inputs) - len(local_crops(inputs))]  # and local crops, for methods with multi-crop
    if len(two) != 2 or not all(isinstance(view, Tensor) and view.ndim >= 2 for view in inputs):
        kinds = ", ".join(
            f"tensor {tuple(view.shape)}" if isinstance(view, Tensor) else type(view).__name__ for view in inputs[:4]
        )
        raise TypeError(
            f"inputs holds {len(inputs)} parts ({kinds}); it must be two views (N, ...). {_CURES}; parts that are not "
            "stacked: collate_fn=dict(type='default_collate'), or data_preprocessor=dict(type='moco_plugins.DataPreprocessor')"
        )
    return list(inputs)


def _nested(views: Any) -> bool:
    """Two views that are dicts of tensors, such as tokens and their mask."""
    return len(views) == 2 and all(isinstance(view, Mapping) for view in views)


def labels_of(samples: Any, count: int) -> tuple[list[int], list[str]]:
    """Return the label (-1: none) and the part of the data ("": unknown) of each sample of a batch."""
    if samples is None:
        return [-1] * count, [""] * count
    if isinstance(samples, Tensor):
        return [int(row if row.ndim == 0 else row[0]) for row in samples], [""] * count
    if isinstance(samples, Mapping):
        return [int(label) for label in samples.get("gt_label", [-1] * count)], list(samples.get("split", [""] * count))
    return [_label(sample) for sample in samples], [str(_field(sample, "split", "")) for sample in samples]


def ids_of(samples: Any) -> list[int] | None:
    """Return the number in the data set of each sample of a batch, MMEngine's ``sample_idx``; None where nobody kept it."""
    if isinstance(samples, Tensor):
        return None
    found = (
        samples.get("sample_idx") if isinstance(samples, Mapping) else [_field(s, "sample_idx", None) for s in samples]
    )
    return None if found is None or any(number is None for number in found) else [int(number) for number in found]


def _field(sample: Any, name: str, default: Any) -> Any:
    return sample.get(name, default) if hasattr(sample, "get") else getattr(sample, name, default)


def _label(sample: Any) -> int:
    label = sample if isinstance(sample, (int, Tensor)) else _field(sample, "gt_label", -1)
    label = getattr(label, "label", label)  # mmpretrain 1.0 and before wrap it
    return int(label)


def _tensors(parts: Any) -> bool:
    return len(parts) > 0 and all(isinstance(part, Tensor) for part in parts)
