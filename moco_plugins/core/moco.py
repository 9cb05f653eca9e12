"""MoCo: queue, momentum encoder, InfoNCE and two views put together (v1, v2, v2+, v3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..hooks import manager as plugins
from ..steps import follow, stepping
from ..steps.boundary import StepBoundary
from ..steps.eager import eager
from . import batchnorm, checks, diagnostics, negatives, start
from . import temperature as learnable
from .average import FloatAverage
from .drift import DriftProbe
from .momentum import Schedule, check_momentum, value_at
from .nested import View, rows
from .normalise import unit_rows
from .parts import build_encoders, place_like
from .stepped import SteppedModule
from .variants import settle


class MoCo(SteppedModule):
    """Momentum Contrast around any backbone.

    ``loss = moco(views)``, ``loss.backward()``, ``optimizer.step()``: that is all. Nothing but BatchNorm statistics changes
    in the forward pass; when an optimiser that owns the query encoder has really stepped, the key encoder moves
    (k <- m k + (1 - m) q) and the keys of all forward passes since the last step enter the queue, on all ranks alike.
    So gradient accumulation, steps skipped by a GradScaler, symmetric losses and checkpoints are right without a flag.
    In eval mode the loss is returned and nothing changes.

    Arguments left at None take the variant's value (:mod:`moco_plugins.core.variants`, with sources).

    Args:
        backbone: images -> (N, feature_dim). It becomes ``query_encoder.backbone``.
        feature_dim: width of the backbone's features.
        variant: "v1", "v2", "v2+", "v3" or "v3-resnet" (the authors' form of v3 around ResNets: two projection layers, no
            BatchNorm at the end of the predictor, T = 1). The loss of v3 is the mean of both directions; the authors' is
            their sum times 2 T, so 4 T times ours: with SGD scale the rate by it; LARS and AdamW do not notice.
        queue_size: K; 65536. 0 for none (v3), which needs ``in_batch_negatives``.
        projection_dim: D; 128, v3: 256.
        momentum: m, the fraction of the key encoder that is kept at each step; 0.999, v3: 0.99 to 1 by cosine.
            A number, or a function of (step, total steps or None).
        temperature: T; v1: 0.07, v3-resnet: 1, others: 0.2. A number, or a function of (step, total steps or None).
        hidden_dim: width of the heads' hidden layers; feature_dim, v3: 4096.
        projection_layers: linear layers of the projection head; v1: 1, v2: 2, v3: 3, v3-resnet: 2.
        head_batch_norm: BatchNorm in the heads; v3 only.
        predictor: a prediction head on the queries; v3 only.
        symmetric: each view is query and key in turn; the loss is the mean of both. v2+ and v3.
        in_batch_negatives: the other keys of the batch, of all ranks, are negatives too. v3 only.
        learnable_temperature: T starts at ``temperature`` and is trained (a parameter, in the logarithm), bound to 0.01
            or more as in CLIP. It must not decay: :class:`moco_plugins.core.lars.LARS` and MoCoModule leave it out, other
            optimisers need it in a group with ``weight_decay=0``, and the first step warns where it decays.
        projector: a projection head of your own, (N, feature_dim) -> (N, projection_dim), in place of the variant's.
        key_encoder: a second backbone of the same architecture, for backbones that cannot be deep-copied.
        shuffle_bn: "auto" (v1 and v2), True or False: keep query and key from sharing BatchNorm statistics, by
            exchanging images between ranks, or in one process by splitting BatchNorm into groups.
        bn_splits: groups of one process, at most; 8, as in the authors' CIFAR-10 demonstration.
        bn_buffers: what the key encoder's buffers do at a step: "own" (they follow its own batches, as in the paper),
            "copy" (the query encoder's), "ema" (averaged like the weights).
        queue, queue_options, queue_fill, queue_resize: name and options of the queue (hook ``moco_build_queue``); the
            last two are options of :class:`moco_plugins.KeyQueue`.
        loss, loss_options: name and options of the loss (hook ``moco_build_loss``).
        momentum_rule, momentum_options: name and options of the momentum rule (hook ``moco_build_momentum``).
        freeze_patch_projection: do not train a ViT's patch projection (v3, section 4.2); None: in v3.
        gather_distributed: the queue takes the keys of all ranks and is the same on all. False: each rank's own.
        gather: the same by name, "whole" or "own", or "sharded": each of R ranks keeps K / R rows and queries travel, for
            queues of millions; see :class:`moco_plugins.core.sharded_queue.ShardedKeyQueue`.
        follow_optimizer: find the step boundary by itself; False: call :meth:`step` after each optimiser step.
        total_steps: optimiser steps of the training, for schedules; may be set later as an attribute.
        allow_low_momentum: permit m < 0.5, which otherwise is taken for the opposite sign convention.
        drift_probe: images kept of each recent step to measure key drift; 0 is off, and costs nothing.

    Attributes:
        query_encoder, key_encoder: images -> (N, D), not normalised. Where their weights are in half precision, the average
            is kept in float32 beside the key encoder's: 4 bytes a weight more, in memory and in checkpoints.
        queue: :class:`moco_plugins.KeyQueue`, or None.

    Raises:
        ValueError, TypeError: an argument is out of range; the message names it, its value and the cure.
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int,
        variant: str = "v2",
        queue_size: int | None = None,
        projection_dim: int | None = None,
        momentum: Schedule | None = None,
        temperature: Schedule | None = None,
        *,
        hidden_dim: int | None = None,
        projection_layers: int | None = None,
        head_batch_norm: bool | None = None,
        predictor: bool | None = None,
        symmetric: bool | None = None,
        in_batch_negatives: bool | None = None,
        learnable_temperature: bool = False,
        projector: nn.Module | None = None,
        key_encoder: nn.Module | None = None,
        shuffle_bn: bool | str = "auto",
        bn_splits: int = batchnorm.BN_SPLITS,
        bn_buffers: str = "own",
        queue: str = "ring",
        queue_fill: str = "random",
        queue_resize: str = "error",
        queue_options: Mapping[str, Any] | None = None,
        loss: str = "info_nce",
        loss_options: Mapping[str, Any] | None = None,
        momentum_rule: str = "ema",
        momentum_options: Mapping[str, Any] | None = None,
        freeze_patch_projection: bool | None = None,
        gather_distributed: bool = True,
        gather: str | None = None,
        follow_optimizer: bool = True,
        total_steps: int | None = None,
        allow_low_momentum: bool = False,
        drift_probe: int = 0,
    ) -> None:
        super().__init__()
        settings = settle(
            variant,
            queue_size=queue_size,
            projection_dim=projection_dim,
            momentum=momentum,
            temperature=temperature,
            hidden_dim=hidden_dim,
            projection_layers=projection_layers,
            head_batch_norm=head_batch_norm,
            predictor=predictor,
            symmetric=symmetric,
            in_batch_negatives=in_batch_negatives,
            shuffle_bn=None if shuffle_bn == "auto" else shuffle_bn,
        )
        check_momentum(settings.momentum, allow_low_momentum)
        checks.check_settings(
            settings, backbone, bn_buffers, feature_dim=feature_dim, bn_splits=bn_splits, drift_probe=drift_probe
        )
        self.settings, self.feature_dim, self.variant = settings, int(feature_dim), variant
        self.bn_splits, self.bn_buffers = int(bn_splits), bn_buffers
        self.follow_optimizer = follow_optimizer
        self.total_steps = total_steps
        freeze = freeze_patch_projection or (False if freeze_patch_projection is None and variant == "v3" else None)
        self.query_encoder, self.predictor, self.key_encoder = build_encoders(
            backbone, feature_dim, settings, projector, key_encoder, freeze
        )
        self.contrast = plugins.build_loss(loss, loss_options or {})
        given = {"fill": queue_fill, "resize": queue_resize, **(queue_options or {})}
        options = negatives.queue_options(self.contrast, given)
        self.gather_distributed, queue = negatives.gathering(gather, gather_distributed, queue)
        size, dim = settings.queue_size, settings.projection_dim
        self.queue: Any = plugins.build_queue(queue, size, dim, options) if size else None
        place_like(backbone, self.query_encoder.projector, self.predictor, self.key_encoder.projector, self.queue)
        self.momentum_rule = plugins.build_momentum(momentum_rule, momentum_options or {})
        if learnable_temperature:
            self.log_temperature = nn.Parameter(learnable.start(value_at(settings.temperature, 0, None)))
        self.drift_probe = DriftProbe(drift_probe) if drift_probe else None
        self.average = FloatAverage(self.key_encoder, bn_buffers == "ema")
        self.boundary = StepBoundary()
        self.prepared = False
        self.monitor = diagnostics.Monitor()
        if follow_optimizer:
            follow.follow_optimizer_steps(self)

    # The step

    @property
    def asks_for(self) -> tuple[str, ...]:
        """Which of "labels" and "ids" training steps need: those that the queue has a column for, or the loss cannot miss."""
        return negatives.asks_for(self.contrast, self.queue)

    def forward(self, views: Sequence[View], labels: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """Return the loss of two views of a batch, each (N, C, H, W) or a nested structure of tensors (N, ...); 0-dim.

        ``labels`` and ``ids`` (of the images) are (N) whole numbers, -1 where unknown; looked at where :attr:`asks_for` has
        them. With ids, keys of the query's own image are no negatives.

        Smaller views that follow them (multi-crop, ``TwoViews(local_views=6)``) are further queries against the same keys.

        Raises:
            ValueError, TypeError: not two views of N images each, or twice the same; labels or ids missing or misshapen.
        """
        x_q, x_k, *crops = checks.check_views(views)
        if self.training and not self.prepared:
            self._prepare(rows(x_q))
        pairs = [(x_q, x_k), (x_k, x_q)] if self.settings.symmetric else [(x_q, x_k)]
        # Keys first: what they need in passing is free again before the queries' activations are kept.
        keys = [self._encode_keys(b, i) for i, (_, b) in enumerate(pairs)]  # N x D each, no gradient
        queries = [unit_rows(self._query(a)) for a, _ in pairs]  # N x D each
        local = unit_rows(self._query(torch.cat(crops))).chunk(len(crops)) if crops else ()  # N x D each
        temperature = self.temperature
        known = negatives.known_of(queries[0], labels, ids, self.asks_for, self.training)
        with torch.autocast(keys[0].device.type, enabled=False):
            losses = [self._contrast(q, k, temperature, known) for q, k in zip(queries, keys, strict=True)]
            losses += [self._contrast(q, k, temperature, known) for q in local for k in keys]
            loss = torch.stack(losses).mean() if len(losses) > 1 else losses[0]
        self._remember(loss, queries[0], keys, temperature)
        if self.training and loss.requires_grad:
            self._stage(keys, loss, x_k, known)
        return loss

    def _query(self, images: View) -> Tensor:
        projected: Tensor = self.query_encoder(images)
        return self.predictor(projected) if self.predictor is not None else projected

    @torch.no_grad()
    def _encode_keys(self, images: View, half: int) -> Tensor:
        if not (self.training and self.settings.shuffle_bn):
            return unit_rows(self.key_encoder(images))
        # Every forward pass has a permutation of its own, the same on all ranks and again after a resume.
        seed = (self.steps * 4096 + self.boundary.passes) * 2 + half
        return unit_rows(batchnorm.encode_apart(self.key_encoder, images, self.bn_splits, seed))

    def _contrast(self, query: Tensor, key: Tensor, temperature: float | Tensor, known: Mapping[str, Tensor]) -> Tensor:
        batch = (self.settings.in_batch_negatives, self.training)
        loss, self._negative_count = negatives.contrast_with(
            self.contrast, query, key, self.queue, temperature, *batch, known
        )
        return loss

    # The step boundary

    @eager
    def _prepare(self, batch: int) -> None:
        start.look(self, batch)
        stepping.prepare(self)

    @eager
    def _stage(self, keys: list[Tensor], loss: Tensor, key_images: View, known: Mapping[str, Tensor]) -> None:
        if self.drift_probe is not None:
            size = self.queue.size if self.queue is not None else 0
            self.drift_probe.take(self.key_encoder, key_images, self.steps, size, len(keys))
        anchor = next((p for p in self.query_encoder.projector.parameters() if p.requires_grad), None)
        stepping.stage(self, keys, loss, anchor, known)

    # What it tells

    def embed(self, images: View) -> Tensor:
        """Return the features of the query backbone (N, feature_dim), without the head."""
        return self.query_encoder.features(images)

    def key_drift(self) -> list[tuple[int, float]]:
        """Return (age in steps, mean of 1 - cosine between a key then and now); needs ``drift_probe`` > 0."""
        if self.drift_probe is None:
            raise RuntimeError("key drift is not measured: build MoCo with drift_probe=64, say (images kept a step)")
        return self.drift_probe.drift(self.key_encoder, self.steps)

    def metrics(self) -> dict[str, float]:
        """Return what the last forward pass can tell, computed now; empty before the first one.

        See :func:`moco_plugins.core.diagnostics.describe`; besides: momentum, and with ``drift_probe`` key_drift (mean over
        the ages kept). Warns of collapse.
        """
        metrics = self.monitor.metrics(self.queue, self.steps)
        if metrics:
            metrics["momentum"] = self.momentum
            metrics |= self.drift_probe.metrics(self.key_encoder, self.steps) if self.drift_probe is not None else {}
        return metrics

    @eager
    def _remember(self, loss: Tensor, query: Tensor, keys: list[Tensor], temperature: float | Tensor) -> None:
        self.monitor.remember(loss, query, keys, temperature, self._negative_count, self.settings.in_batch_negatives)
