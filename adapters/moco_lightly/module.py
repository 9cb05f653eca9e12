"""MoCo as a LightningModule, for either name of Lightning.

:mod:`moco_lightly.pytorch_lightning` and :mod:`moco_lightly.lightning` make a class of :class:`MoCoBody` and their
LightningModule; ``moco_lightly.MoCoModule`` is the one that belongs to the Lightning which is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from moco_plugins import Cosine, MoCo
from moco_plugins.backbones import build_backbone

from . import batches, frameworks
from .frameworks import lightning_name
from .optimizers import Recipe
from .probes import FeatureMemory, OnlineLinearProbe

# Made a LightningModule by its two subclasses; to the type checker it may have any attribute.
_Base: Any = object


class MoCoBody(_Base):
    """MoCo around any backbone, with optimiser, schedule, metrics and online evaluation.

    Training batches are lightly's ``(views, targets, filenames)`` or plain ``(views, targets)``; validation batches
    ``(images, targets)``. Two validation loaders are a bank of training images and the images to classify, as in lightly's
    benchmarks; with one, kNN uses the features of the newest training batches.

    Hyper-parameters are saved in the checkpoint; a backbone that is a module, and schedules that are functions, are not:
    pass them to ``load_from_checkpoint`` again.

    Args:
        backbone: images -> (N, feature_dim), or the name of a torchvision or timm model.
        feature_dim: width of the backbone's features; needed where ``backbone`` is a module.
        variant, queue_size, projection_dim, momentum, temperature: see :class:`moco_plugins.MoCo`; None is the variant's
            value. ``momentum`` may also be a pair (start, end), which is a half cosine.
        channels, image_size: of the images, for a backbone given by name.
        optimizer: "sgd" (the paper's), "adamw" or "lars"; override ``configure_optimizers`` for others.
        lr: learning rate for a batch of 256; 0.03 (arXiv:1911.05722, section 4.1). Scaled linearly with the global batch.
        scale_lr: False: ``lr`` is taken as it is.
        sgd_momentum: 0.9 (section 4.1).
        weight_decay: 1e-4 (section 4.1).
        decay_all: norms and biases decay as well, as in the paper; False: they do not, as in lightly's benchmark.
        schedule: "cosine" (v2) or "constant".
        warmup_epochs: epochs of linear warm-up; 0 (v3: 40 of 300).
        batch_size: images of a process in one batch; None: the training loader's.
        num_classes: classes of the targets; turns on online kNN and linear probe. They never change the training.
        knn_k, knn_temperature: 20 and 0.1.
        knn_bank: features of the newest training batches that are kept for kNN.
        **moco_options: further arguments of :class:`moco_plugins.MoCo`.

    Attributes:
        moco: the :class:`moco_plugins.MoCo`.
    """

    def __init__(
        self,
        backbone: nn.Module | str,
        feature_dim: int | None = None,
        variant: str = "v2",
        queue_size: int | None = None,
        projection_dim: int | None = None,
        momentum: Any = None,
        temperature: Any = None,
        *,
        channels: int = 3,
        image_size: int = 224,
        optimizer: str = "sgd",
        lr: float = 0.03,
        scale_lr: bool = True,
        sgd_momentum: float = 0.9,
        weight_decay: float = 1e-4,
        decay_all: bool = True,
        schedule: str = "cosine",
        warmup_epochs: float = 0,
        batch_size: int | None = None,
        num_classes: int | None = None,
        knn_k: int = 20,
        knn_temperature: float = 0.1,
        knn_bank: int = 16384,
        **moco_options: Any,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=_not_plain({**locals(), **moco_options}))
        if isinstance(backbone, str):
            backbone, feature_dim = build_backbone(backbone, channels, image_size)
        if feature_dim is None:
            raise ValueError("feature_dim=None: give the width of the backbone's features, or the backbone by its name")
        if isinstance(momentum, Sequence):
            momentum = Cosine(*momentum)
        self.moco = MoCo(
            backbone, feature_dim, variant, queue_size, projection_dim, momentum, temperature, **moco_options
        )
        self.recipe = Recipe(optimizer, lr, scale_lr, sgd_momentum, weight_decay, decay_all, schedule, warmup_epochs)
        self.batch_size, self.knn_k, self.knn_temperature = batch_size, knn_k, knn_temperature
        self.probe = OnlineLinearProbe(feature_dim, num_classes) if num_classes else None
        self._recent, self._bank, self._queries = FeatureMemory(knn_bank), FeatureMemory(), FeatureMemory()

    def forward(self, images: Tensor) -> Tensor:
        """Return the backbone's features (N, feature_dim)."""
        return self.moco.embed(images)

    # Training

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch; log loss, metrics and the online probe."""
        views, targets = batches.two_views(batch)
        n = views[0].shape[0]
        if self.probe is None or targets is None:
            loss: Tensor = self.moco(views)
        else:
            loss, features = self._loss_and_features(views)
            probe_loss, accuracy = self.probe.learn(features, targets)
            self._recent.add(features, targets)
            self.log_dict({"train_probe_loss": probe_loss, "train_probe_top1": accuracy}, batch_size=n)
        self.log("train_loss", loss.detach(), prog_bar=True, batch_size=n)
        if (batch_idx + 1) % max(1, self.trainer.log_every_n_steps) == 0:
            self.log_dict({f"moco/{name}": value for name, value in self.moco.metrics().items()}, batch_size=n)
        return loss

    def _loss_and_features(self, views: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The features of the query view are computed anyway: catch them on their way to the head."""
        caught: list[Tensor] = []
        handle = self.moco.query_encoder.backbone.register_forward_hook(lambda *call: caught.append(call[2].detach()))
        try:
            loss: Tensor = self.moco(views)
        finally:
            handle.remove()
        return loss, caught[0]

    def configure_optimizers(self) -> Any:
        """Return optimiser and schedule; also tells MoCo the length of the training."""
        total = self.trainer.estimated_stepping_batches
        known = total != float("inf")
        self.moco.total_steps = int(total) if known else None
        global_batch = self._global_batch()
        optimizer = self.recipe.build_optimizer(self.moco, global_batch)
        if global_batch is not None:
            self._say(f"MoCo {self.moco.variant}: {global_batch} images a step, {_rate(optimizer):.3g} learning rate")
        if not known:
            return optimizer
        epochs = self.trainer.max_epochs
        warmup = round(self.recipe.warmup_epochs * total / epochs) if epochs and epochs > 0 else 0
        schedule = self.recipe.build_schedule(optimizer, int(total), warmup)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def _global_batch(self) -> int | None:
        """Images of an optimiser step, of all processes."""
        loader = self.trainer.train_dataloader
        size = self.batch_size or getattr(loader, "batch_size", None)
        size = size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        return size * self.trainer.world_size * self.trainer.accumulate_grad_batches if size else None

    def _say(self, message: str) -> None:
        pl = type(self.trainer).__module__.partition(".trainer")[0]
        importlib.import_module(f"{pl}.utilities.rank_zero").rank_zero_info(message)

    # Evaluation: everything is in eval mode and without gradient here, by Lightning

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Collect features; the last loader holds the images to classify, the one before it, if any, the bank."""
        images, targets = batches.images(batch)
        if self.probe is None or targets is None:
            return
        features = self.moco.embed(images).float()
        if dataloader_idx < self._loader_count() - 1:
            self._bank.add(features, targets)
            return
        self._queries.add(features, targets)
        accuracy = (self.probe(features).argmax(1) == targets).float().mean()
        self.log(
            "val_probe_top1",
            accuracy,
            on_epoch=True,
            batch_size=len(targets),
            sync_dist=True,
            add_dataloader_idx=False,
        )

    def _loader_count(self) -> int:
        loaders = self.trainer.val_dataloaders
        return len(loaders) if isinstance(loaders, (list, tuple, Mapping)) else 1

    def on_validation_epoch_end(self) -> None:
        """Log the accuracy of kNN."""
        from moco_plugins.evaluation import knn_accuracy

        bank = (self._bank if self._bank.rows else self._recent).collect()
        queries = self._queries.collect()
        if bank is not None and queries is not None:
            accuracy = knn_accuracy(*bank, *queries, k=self.knn_k, temperature=self.knn_temperature)
            self.log("val_knn_top1", accuracy, prog_bar=True)
        self._bank.clear()
        self._queries.clear()

    def on_train_epoch_start(self) -> None:
        """Forget the features of the epoch before."""
        self._recent.clear()


def _rate(optimizer: Any) -> float:
    return float(optimizer.param_groups[0]["lr"])


def _not_plain(arguments: Mapping[str, Any]) -> list[str]:
    """The arguments that a checkpoint cannot hold without pickled code."""
    return [name for name, value in arguments.items() if not _is_plain(value)]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(part) for part in (*value.keys(), *value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def __getattr__(name: str) -> Any:
    if name == "MoCoModule":
        return lightning_module_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def lightning_module_class(lightning: str | None = None) -> Any:
    """Return the class ``MoCoModule`` for one name of Lightning.

    Args:
        lightning: "pytorch_lightning" or "lightning"; None: the one that is imported, see
            :func:`moco_lightly.frameworks.lightning_name`.
    """
    name = lightning_name(lightning)
    frameworks.lightning(name)
    return importlib.import_module(f"moco_lightly.{name.partition('.')[0]}").MoCoModule
