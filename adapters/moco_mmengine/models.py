"""Self-supervised methods as MMEngine models: ``moco_plugins.MoCo``, and every registered method by its name."""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from mmengine.logging import MessageHub
from mmengine.model import BaseModel, ImgDataPreprocessor
from mmengine.optim import OptimWrapperDict
from torch import Tensor, nn

from moco_plugins.checkpoints import load
from moco_plugins.core import moco as core
from moco_plugins.core.momentum import Cosine
from moco_plugins.core.nested import first, rows
from moco_plugins.hooks import manager as plugins
from moco_plugins.hooks.method import asked_of
from moco_plugins.sizes import Size

from .backbone import build_features, initialise, try_width
from .batches import PerView, check_views, ids_of, labels_of
from .together import step_together

#: What other MMEngine projects call our options.
_OTHER_NAMES = {
    "queue_len": "queue_size",
    "feat_dim": "projection_dim",
    "base_momentum": "momentum",
    "head": "temperature (and loss)",
    "pretrained": "init_cfg",
}


class MethodModel(BaseModel):
    """Any self-supervised method (:class:`moco_plugins.hooks.method.Method`) as an MMEngine model.

    Modes of ``forward``: "loss" takes two views and returns ``dict(loss=...)``; "tensor" returns the features (N, D);
    "predict" returns for each image ``dict(features=(D,), label=..., split=...)``, which the metrics of this package take.
    The method's own metrics go into MMEngine's log every ``metrics_interval`` iterations.

    Args:
        method: the method; :attr:`method` afterwards.
        data_preprocessor: config or module; ``moco_plugins.DataPreprocessor`` unless given. MMEngine's
            ImgDataPreprocessor, and those of other projects that are made of it, are called for each view.
        init_cfg: MMEngine's. Parts of the backbone with an ``init_cfg`` of their own are initialised too.
        metrics_interval: iterations between two logs of the metrics, 10 as in MMEngine's LoggerHook; 0: none.
    """

    def __init__(
        self, method: nn.Module, data_preprocessor: Any = None, init_cfg: Any = None, metrics_interval: int = 10
    ) -> None:
        super().__init__(data_preprocessor or {"type": "moco_plugins.DataPreprocessor"}, init_cfg)
        if isinstance(self.data_preprocessor, ImgDataPreprocessor):
            self.data_preprocessor: Any = PerView(self.data_preprocessor)
        self.method: Any = method
        self.metrics_interval = metrics_interval
        self._forwards = 0

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, Tensor]:
        """See MMEngine; besides, tell the method how many optimiser steps there will be.

        Several optimisers (``OptimWrapperDict``), each of a part of the model, step together.
        """
        self._tell_total_steps(getattr(optim_wrapper, "_accumulative_counts", 1))
        if isinstance(optim_wrapper, OptimWrapperDict):
            return step_together(self, data, list(optim_wrapper.values()))
        return super().train_step(data, optim_wrapper)

    def forward(self, inputs: Any = None, data_samples: Any = None, mode: str = "tensor", **unknown: Any) -> Any:
        """Return the loss of two views, or the features or predictions of images (of their first view)."""
        if inputs is None or unknown:
            raise TypeError(
                f"the batch has {', '.join(map(repr, unknown)) or 'no inputs'}; the model takes 'inputs' and "
                "'data_samples': use data_preprocessor=dict(type='moco_plugins.DataPreprocessor'), and let the pipeline "
                "end with moco_plugins.TwoViews or mmpretrain's PackInputs"
            )
        if mode == "loss":
            return self._loss(check_views(inputs), data_samples)
        images = inputs if isinstance(inputs, Tensor) else inputs[0]
        features = self.method.embed(images)
        if mode == "tensor":
            return features
        if mode != "predict":
            raise ValueError(f"mode={mode!r} is not one of loss, tensor, predict")
        labels, splits = labels_of(data_samples, len(features))
        known = zip(features.detach(), labels, splits, strict=True)
        return [{"features": row, "label": label, "split": split} for row, label, split in known]

    def _loss(self, views: list[Tensor], data_samples: Any) -> dict[str, Tensor]:
        if self.training:
            self._tell_total_steps(1)
        asked: dict[str, Any] = asked_of(self.method)
        if asked and data_samples is not None:
            found = {"labels": labels_of(data_samples, rows(views[0]))[0], "ids": ids_of(data_samples)}
            asked = {
                name: None if found[name] is None else torch.tensor(found[name], device=first(views[0]).device)
                for name in asked
            }
        loss = self.method(views, **asked)
        if self.training and self.metrics_interval:
            self._forwards += 1
            if self._forwards % self.metrics_interval == 0:
                self._log_metrics()
        return {"loss": loss}

    def _log_metrics(self) -> None:
        hub = MessageHub.get_current_instance()
        for name, value in self.method.metrics().items():
            if name != "loss":  # MMEngine logs it
                hub.update_scalar(f"train/{name}", float(value))

    def _tell_total_steps(self, accumulative_counts: int) -> None:
        # In DDP the wrapper has its own train_step, and only MethodHook knows of accumulation.
        if self.method.total_steps is None:
            iterations = MessageHub.get_current_instance().get_info("max_iters")
            if iterations:
                self.method.total_steps = math.ceil(iterations / accumulative_counts)


class ConfiguredModel(MethodModel):
    """A method built from a config: backbone, neck, and the method's own options.

    Args:
        backbone: config of any registry, or a built module; images -> (N, D), feature maps, or a tuple of them.
        neck: config or module. Without parameters it is part of the backbone (pooling); with parameters it is the
            projection head, as in mmpretrain.
        feature_dim: width of the backbone's features; found by trying one image unless given.
        image_size: size of that image, 224.
        data_preprocessor, init_cfg, metrics_interval: see :class:`MethodModel`. ``dict(type='Pretrained', checkpoint=FILE)``
            takes a checkpoint of any known format (:func:`moco_plugins.checkpoints.load`) and all that it has; what does not
            fit is an error.
        options: of the method. A schedule of ``momentum`` or ``temperature`` is written ``dict(start=0.99, end=1.0)``;
            ``key_encoder`` is, like ``backbone``, a config.

    Raises:
        TypeError: an option that the method does not have; the message lists those it has.
    """

    #: The method's name among :func:`moco_plugins.plugins.methods`.
    factory: ClassVar[Callable[..., nn.Module]]

    def __init__(
        self,
        backbone: Any,
        neck: Any = None,
        feature_dim: int | None = None,
        image_size: Size = 224,
        data_preprocessor: Any = None,
        init_cfg: Any = None,
        metrics_interval: int = 10,
        **options: Any,
    ) -> None:
        factory = type(self).factory
        _check_options(type(self).__name__, factory, options)
        features, projector, width = build_features(backbone, neck, feature_dim, image_size)
        if isinstance(options.get("key_encoder"), Mapping):
            options["key_encoder"] = build_features(options["key_encoder"], neck, feature_dim, image_size)[0]
        if projector is not None:
            options.setdefault("projection_dim", try_width(_After(width, projector), 1, channels=width))
        method = factory(features, width, **{name: _plain_value(value) for name, value in options.items()})
        if projector is not None:
            _replace_projectors(method, projector)
        init_cfg, self._start_from = starting_weights(init_cfg)
        super().__init__(method, data_preprocessor, init_cfg, metrics_interval)

    def init_weights(self) -> None:
        """Initialise the whole and the backbone's parts as MMEngine does; weights of a checkpoint come last."""
        initialise(self.method)
        super().init_weights()
        if self._start_from is not None:
            weights, method = load(self._start_from), self.method
            if isinstance(method, core.MoCo):
                weights.load_into(method)
            else:
                weights.load_backbone_into(method.encoder.backbone)


class MoCo(ConfiguredModel):
    """MoCo v1, v2, v2+ and v3 for MMEngine; the options are those of :class:`moco_plugins.MoCo`."""

    factory = core.MoCo


def method_type(name: str) -> type[ConfiguredModel]:
    """Make the MMEngine type of a registered method."""
    factory = staticmethod(plugins.method_factory(name))
    doc = f"The method {name!r} for MMEngine; see :class:`ConfiguredModel`."
    return type(name, (ConfiguredModel,), {"factory": factory, "__doc__": doc, "__module__": "moco_mmengine"})


def starting_weights(init_cfg: Any) -> tuple[Any, str | None]:
    """Part an ``init_cfg`` into what MMEngine does and a file that we read; its prefixes and addresses stay MMEngine's."""
    given = [init_cfg] if isinstance(init_cfg, Mapping) else list(init_cfg or [])
    ours = [
        cfg["checkpoint"]
        for cfg in given
        if cfg.get("type") == "Pretrained" and not cfg.get("prefix") and os.path.exists(str(cfg.get("checkpoint")))
    ]
    rest = [cfg for cfg in given if cfg.get("checkpoint") not in ours]
    return rest or None, str(ours[-1]) if ours else None


class _After(nn.Module):
    """Features of a given width as images of 1 x 1, to try a projection head."""

    def __init__(self, width: int, projector: nn.Module) -> None:
        super().__init__()
        self.projector = projector

    def forward(self, images: Tensor) -> Tensor:
        return self.projector(images.flatten(1))


def _replace_projectors(method: nn.Module, projector: nn.Module) -> None:
    if not isinstance(method, core.MoCo):
        raise TypeError(f"neck has parameters, and {type(method).__name__} has its own projection head; leave it out")
    method.query_encoder.projector = projector
    method.key_encoder.projector = copy.deepcopy(projector).requires_grad_(False)


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"start", "end"}:
        return Cosine(**value)
    return value


def _check_options(name: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(factory).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for option in options:
        if option not in parameters:
            ours = _OTHER_NAMES.get(option)
            cure = f"here it is {ours}" if ours else "there are: " + ", ".join(list(parameters)[2:])
            raise TypeError(f"{option}={options[option]!r} is not an option of moco_plugins.{name}; {cure}")
