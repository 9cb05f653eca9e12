"""CrossMoCo: two kinds of input, two momentum encoders, two queues; each kind is contrasted with the other's keys.

As ALBEF does it (Li et al. 2021, arXiv:2107.07651, section 3.2, equation 1), and BLIP (arXiv:2201.12086) after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..hooks import manager as plugins
from ..steps import follow, stepping
from ..steps.boundary import StepBoundary
from ..steps.eager import eager
from . import checks, diagnostics, negatives
from . import temperature as learnable
from .average import FloatAverage
from .encoder import Encoder
from .momentum import Schedule, check_momentum, value_at
from .nested import View
from .normalise import unit_rows
from .parts import place_like
from .stepped import SteppedModule
from .variants import projection_head


@dataclass(frozen=True)
class CrossSettings:
    """What schedules are read from."""

    momentum: Schedule
    temperature: Schedule
    in_batch_negatives: bool
    shuffle_bn: bool = False  # the two encoders share no statistics


class CrossMoCo(SteppedModule):
    """Contrast images with texts, or any two kinds of input, both ways.

    ``loss = cross((images, texts))``, then backward and the optimiser's step, as with :class:`moco_plugins.MoCo`: both key
    encoders and both queues follow the step that was really taken, under accumulation, GradScaler, DDP and after a resume.

        L = (InfoNCE(q_image, keys of texts) + InfoNCE(q_text, keys of images)) / 2

    Args:
        image_encoder, text_encoder: modules, first input -> (N, image_dim) and second -> (N, text_dim). An input is a tensor
            or a nested structure of tensors with N rows.
        image_dim, text_dim: width of their features.
        queue_size: K of each queue; 65536 (section 3.5).
        projection_dim: D; 256, one linear layer each (section 3.2).
        momentum: m, the fraction of the key encoders that is kept; 0.995 (section 3.5).
        temperature: T; 0.07, which ALBEF learns: ``learnable_temperature=True``.
        in_batch_negatives: the other keys of the batch are negatives too; True, as in ALBEF.
        queue_options, loss, loss_options: see :class:`moco_plugins.MoCo`. With a column ``id``, pairs of one id (all pictures
            of one text, say) are no negatives of each other.
        gather_distributed, follow_optimizer, total_steps: see :class:`moco_plugins.MoCo`.

    Attributes:
        query_encoder, key_encoder: "image" and "text" in each, input -> (N, D), not normalised.
        queue: two :class:`moco_plugins.KeyQueue`, of images and of texts.

    Raises:
        ValueError, TypeError: an argument is out of range; the message names it, its value and the cure.
    """

    def __init__(
        self,
        image_encoder: nn.Module,
        text_encoder: nn.Module,
        image_dim: int,
        text_dim: int,
        queue_size: int = 65536,
        projection_dim: int = 256,
        momentum: Schedule = 0.995,
        temperature: Schedule = 0.07,
        *,
        in_batch_negatives: bool = True,
        learnable_temperature: bool = False,
        queue_options: Mapping[str, Any] | None = None,
        loss: str = "info_nce",
        loss_options: Mapping[str, Any] | None = None,
        gather_distributed: bool = True,
        follow_optimizer: bool = True,
        total_steps: int | None = None,
    ) -> None:
        super().__init__()
        check_momentum(momentum, False)
        if not value_at(temperature, 0, None) > 0:
            raise ValueError(f"temperature={temperature!r} must be greater than 0 (0.07 in ALBEF)")
        parts = {"image": (image_encoder, image_dim), "text": (text_encoder, text_dim)}
        for name, (encoder, width) in parts.items():
            if not isinstance(encoder, nn.Module):
                raise TypeError(
                    f"{name}_encoder={encoder!r} is a {type(encoder).__name__}; it must be a torch.nn.Module"
                )
            checks.whole_number(f"{name}_dim", width)
        checks.whole_number("queue_size", queue_size)
        checks.whole_number("projection_dim", projection_dim)
        if {id(p) for p in image_encoder.parameters()} & {id(p) for p in text_encoder.parameters()}:
            raise ValueError("image_encoder and text_encoder share parameters; give each its own: copy.deepcopy")
        self.settings = CrossSettings(momentum, temperature, in_batch_negatives)
        self.feature_dim, self.total_steps, self.bn_buffers = image_dim, total_steps, "own"
        self.gather_distributed, self.follow_optimizer = gather_distributed, follow_optimizer
        self.query_encoder, self.key_encoder = nn.ModuleDict(), nn.ModuleDict()
        self.contrast = plugins.build_loss(loss, loss_options or {})
        options = negatives.queue_options(self.contrast, queue_options or {})
        self.queue = nn.ModuleList()
        for name, (encoder, width) in parts.items():
            query = Encoder(encoder, projection_head(width, width, projection_dim, 1, False), width)
            second = checks.second_backbone(encoder, None)
            key = Encoder(second, projection_head(width, width, projection_dim, 1, False), width).requires_grad_(False)
            key.projector.load_state_dict(query.projector.state_dict())
            queue = plugins.build_queue("ring", queue_size, projection_dim, options)
            place_like(encoder, query.projector, key.projector, queue)
            self.query_encoder[name], self.key_encoder[name] = query, key
            self.queue.append(queue)
        if learnable_temperature:
            self.log_temperature = nn.Parameter(learnable.start(value_at(temperature, 0, None)))
        self.momentum_rule = plugins.build_momentum("ema", {})
        self.average = FloatAverage(self.key_encoder, False)
        self.boundary = StepBoundary()
        self.prepared = False
        self.monitor = diagnostics.Monitor()
        if follow_optimizer:
            follow.follow_optimizer_steps(self)

    @property
    def asks_for(self) -> tuple[str, ...]:
        """Which of "labels" and "ids" training steps need."""
        return negatives.asks_for(self.contrast, self.queue[0])

    def forward(self, pair: Sequence[View], labels: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """Return the loss of N pairs, ``(images, texts)``, row i of both belonging together; 0-dim.

        ``labels`` and ``ids`` are (N) whole numbers of the pairs, looked at where :attr:`asks_for` has them.

        Raises:
            ValueError, TypeError: not two inputs of N rows each; labels or ids missing or misshapen.
        """
        inputs = dict(zip(("image", "text"), checks.check_views(pair), strict=True))
        if self.training and not self.prepared:
            self._prepare()
        with torch.no_grad():
            keys = {name: unit_rows(self.key_encoder[name](part)) for name, part in inputs.items()}  # N x D each
        queries = {name: unit_rows(self.query_encoder[name](part)) for name, part in inputs.items()}
        known = negatives.known_of(queries["image"], labels, ids, self.asks_for, self.training)
        temperature = self.temperature
        in_batch, losses = self.settings.in_batch_negatives, []
        with torch.autocast(keys["image"].device.type, enabled=False):
            for name, other, queue in (("image", "text", self.queue[1]), ("text", "image", self.queue[0])):
                value, count = negatives.contrast_with(
                    self.contrast, queries[name], keys[other], queue, temperature, in_batch, self.training, known
                )
                losses.append(value)
            loss = torch.stack(losses).mean()
        self._remember(loss, queries["image"], keys["text"], temperature, count)
        if self.training and loss.requires_grad:
            self._stage(keys, loss, known)
        return loss

    @eager
    def _prepare(self) -> None:
        stepping.prepare(self)

    @eager
    def _stage(self, keys: Mapping[str, Tensor], loss: Tensor, known: Mapping[str, Tensor]) -> None:
        heads: list[Any] = [self.query_encoder[name].projector for name in keys]
        anchor = next((p for head in heads for p in head.parameters() if p.requires_grad), None)
        stepping.stage(self, [keys["text"], keys["image"]], loss, anchor, known)

    @eager
    def _remember(self, loss: Tensor, query: Tensor, key: Tensor, temperature: float | Tensor, count: int) -> None:
        held = temperature.detach() if isinstance(temperature, Tensor) else temperature
        in_batch = self.settings.in_batch_negatives
        self.monitor.last = diagnostics.LastStep(loss.detach(), query.detach(), [key], held, count, in_batch)

    def embed(self, images: View) -> Tensor:
        """Return the features of the first input (N, image_dim), without the head."""
        encoder: Any = self.query_encoder["image"]
        return encoder.features(images)

    def project(self, images: View | None = None, texts: View | None = None) -> list[Tensor]:
        """Return unit vectors (N, D) of what is given: their products say which belong together."""
        given = {"image": images, "text": texts}
        return [unit_rows(self.query_encoder[name](part)) for name, part in given.items() if part is not None]

    def metrics(self) -> dict[str, float]:
        """Return what the last forward pass can tell of images against texts, as :meth:`moco_plugins.MoCo.metrics`."""
        metrics = self.monitor.metrics(self.queue[1], self.steps)
        return {**metrics, "momentum": self.momentum} if metrics else {}
