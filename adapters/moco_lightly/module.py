"""MoCo as a LightningModule, for either name of Lightning.

:mod:`moco_lightly.pytorch_lightning` and :mod:`moco_lightly.lightning` make a class of :class:`MoCoBody` and their
LightningModule; ``moco_lightly.MoCoModule`` is the one that belongs to the Lightning which is imported.
"""

from __future__ import annotations

import importlib
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from moco_plugins import Cosine, MoCo
from moco_plugins.backbones import build_backbone
from moco_plugins.checkpoints import load
from moco_plugins.core.nested import rows
from moco_plugins.hooks.method import asked_of
from moco_plugins.sizes import Size
from moco_plugins.steps import distributed

from . import batches, frameworks, lengths
from .frameworks import lightning_name
from .online import Evaluation, loss_and_features
from .optimizers import Recipe
from .probes import FeatureMemory, OnlineLinearProbe

# Made a LightningModule by its two subclasses; to the type checker it may have any attribute.
_Base: Any = object


class MoCoBody(_Base):
    """MoCo around any backbone, with optimiser, schedule, metrics and online evaluation.

    Training batches are lightly's ``(views, targets, filenames)`` or plain ``(views, targets)``, or several of them by the
    key of their loader (Lightning's CombinedLoader), which are joined. Batches for validation and test are
    ``(images, targets)``, or have two views, too; then the loss is logged as well. Two such loaders are a bank of training
    images and the images to classify, as in lightly's benchmarks; with one, kNN uses the features of the newest training
    batches. Each image counts once, however many processes there are; images with the label -1 take no part.
    ``trainer.predict`` returns a dict a batch: ``embeddings`` (N, feature_dim), and where the batch has them ``targets``
    and ``filenames``.

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
            A rate that is set later (``module.lr = 0.1``, ``module.hparams.lr``, ``Tuner.lr_find``) is taken as it is.
        scale_lr: False: ``lr`` is taken as it is.
        sgd_momentum: 0.9 (section 4.1).
        weight_decay: 1e-4 (section 4.1).
        decay_all: norms and biases decay as well, as in the paper; False: they do not, as in lightly's benchmark.
        schedule: "cosine" (v2) or "constant".
        warmup_epochs: epochs of linear warm-up, counted in batches; 0 (v3: 40 of 300).
        batch_size: images of a process in one batch; None: the training loader's.
        num_classes: classes of the targets; turns on online kNN and linear probe. They never change the training.
        knn_k, knn_temperature: 20 and 0.1.
        knn_bank: features of the newest training batches that are kept for kNN.
        init: weights to start from: a checkpoint of any known format (:func:`moco_plugins.checkpoints.load`). All that it
            has is taken: backbone, heads, key encoder, queue, steps. It is no hyper-parameter: a checkpoint needs it no more.
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
        image_size: Size = 224,
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
        init: str | None = None,
        **moco_options: Any,
    ) -> None:
        super().__init__()
        feature_dim, queue_size, projection_dim = map(_plain, (feature_dim, queue_size, projection_dim))
        self.save_hyperparameters(ignore=["init", *_not_plain({**locals(), **moco_options})])
        if isinstance(backbone, str):
            backbone, feature_dim = build_backbone(backbone, channels, image_size)
        if feature_dim is None:
            raise ValueError("feature_dim=None: give the width of the backbone's features, or the backbone by its name")
        if isinstance(momentum, Sequence):
            momentum = Cosine(*momentum)
        self.moco = MoCo(
            backbone, feature_dim, variant, queue_size, projection_dim, momentum, temperature, **moco_options
        )
        if init is not None:
            load(init).load_into(self.moco)
        self.recipe = Recipe(optimizer, lr, scale_lr, sgd_momentum, weight_decay, decay_all, schedule, warmup_epochs)
        self.batch_size, self.knn_k, self.knn_temperature = batch_size, knn_k, knn_temperature
        self.probe = OnlineLinearProbe(feature_dim, num_classes) if num_classes else None
        self._recent, self._evaluation = FeatureMemory(feature_dim, knn_bank), Evaluation(feature_dim)
        self._labelled: Tensor | int | None = 0  # rows so far in this training; None: it was said that there are none
        self._metrics: dict[str, float] | None = None  # of this epoch, where a step has logged none
        self._metrics_step = 0

    @property
    def lr(self) -> float:
        """The learning rate: for a batch of 256, or the rate itself where it was set."""
        return self.recipe.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.recipe = replace(self.recipe, lr=float(value), scale_lr=False)
        if "lr" in self.hparams:
            self.hparams.update(lr=float(value), scale_lr=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the backbone's features (N, feature_dim)."""
        return self.moco.embed(images)

    # Training

    def on_train_start(self) -> None:
        """Tell MoCo the length of the training, whoever makes the optimiser; say what does not suit the data."""
        lengths.tell(self)
        self._metrics_step = self.trainer.global_step
        if self._labelled is not None:
            self._labelled = 0

    def on_train_epoch_start(self) -> None:
        """Forget the features of the epoch before."""
        self._recent.clear()
        self._metrics = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch; log it, and the online probe."""
        views, targets = batches.two_views(batch)
        n = rows(views[0])
        known = asked_of(self.moco, targets, batches.ids(batch) if self.moco.asks_for else None)
        targets = batches.labels(targets) if self.probe is not None else None
        try:
            loss, features = loss_and_features(self.moco, views, targets is not None, **known)
        except ValueError as error:
            lengths.explain(error, n, batch_idx)
            raise
        if self.probe is not None and targets is not None and features is not None:
            probe_loss, accuracy = self.probe.learn(features, targets)
            self._recent.add(features, targets)
            if self._labelled is not None:
                self._labelled = self._labelled + (targets >= 0).sum()
            self.log_dict({"train_probe_loss": probe_loss, "train_probe_top1": accuracy}, batch_size=n)
        self.log("train_loss", loss.detach(), prog_bar=True, batch_size=n)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log MoCo's metrics at every n-th step of the training; where an epoch has none, take them at its end."""
        step, every = self.trainer.global_step, self.trainer.log_every_n_steps
        if step != self._metrics_step and every and step % every == 0:
            self._metrics_step, self._metrics = step, None
            self.log_dict(self._moco_metrics())
        elif self._metrics is not None and self.trainer.is_last_batch:
            self._metrics = self._moco_metrics()

    def on_train_epoch_end(self) -> None:
        """Log MoCo's metrics once an epoch at least."""
        if self._metrics is not None:
            self.log_dict(self._metrics or self._moco_metrics())
        if self.probe is not None and self._labelled is not None and not int(self._labelled):
            self._labelled = None
            distributed.warn_once_on_first_rank(
                f"num_classes={self.probe.num_classes} and no image of the training has a label (whole numbers from 0), so "
                "there is nothing for the online probe and kNN to learn; give labels, or leave num_classes=None"
            )

    def _moco_metrics(self) -> dict[str, float]:
        return {f"moco/{name}": value for name, value in self.moco.metrics().items()}

    def configure_optimizers(self) -> Any:
        """Return optimiser and schedule."""
        if self.hparams.get("lr", self.lr) != self.lr:
            self.lr = self.hparams["lr"]
        total, epoch = lengths.steps(self.trainer)
        global_batch = lengths.global_batch(self.trainer, self.batch_size)
        optimizer = self.recipe.build_optimizer(self.moco, global_batch)
        if global_batch is not None:
            self._say(f"MoCo {self.moco.variant}: {global_batch} images a step, {_rate(optimizer):.3g} learning rate")
        schedule = lengths.schedule(self.recipe, optimizer, total, epoch)
        return optimizer if schedule is None else ([optimizer], [{"scheduler": schedule, "interval": "step"}])

    def _say(self, message: str) -> None:
        pl = type(self.trainer).__module__.partition(".trainer")[0]
        importlib.import_module(f"{pl}.utilities.rank_zero").rank_zero_info(message)

    # Evaluation: everything is in eval mode and without gradient here, by Lightning

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Collect features; the last loader holds the images to classify, the one before it, if any, the bank."""
        self._evaluation.take(self.moco, self.probe, batch, dataloader_idx, self.trainer.val_dataloaders)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """As in validation."""
        self._evaluation.take(self.moco, self.probe, batch, dataloader_idx, self.trainer.test_dataloaders)

    def on_validation_epoch_end(self) -> None:
        """Log loss, and accuracies of probe and kNN; the same on all ranks."""
        self._log_evaluation("val")

    def on_test_epoch_end(self) -> None:
        """As in validation."""
        self._log_evaluation("test")

    def _log_evaluation(self, stage: str) -> None:
        recent = self._recent if self.probe is not None else None
        results = self._evaluation.results(recent, self.device, self.knn_k, self.knn_temperature)
        self._evaluation.clear()
        for name, value in results.items():
            self.log(f"{stage}_{name}", value, prog_bar=name == "knn_top1", sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return ``embeddings`` (N, feature_dim), and ``targets`` and ``filenames`` where the batch has them."""
        images, targets = batches.images(batch)
        told = {"targets": targets, "filenames": batches.file_names(batch)}
        return {
            "embeddings": self.moco.embed(images),
            **{name: part for name, part in told.items() if part is not None},
        }


def _plain(value: Any) -> Any:
    """numpy's whole numbers as int, so that a checkpoint can hold them."""
    return int(value) if isinstance(value, numbers.Integral) and not isinstance(value, bool) else value


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
