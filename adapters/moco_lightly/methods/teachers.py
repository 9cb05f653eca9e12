"""Methods with a teacher, a moving average of the student: BYOL and DINO."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moco_plugins.core.encoder import Encoder
from moco_plugins.core.momentum import Cosine, Schedule, check_momentum, ema, value_at
from moco_plugins.steps.pairing import copy_module, pair_parameters

from ..frameworks import lightly
from .base import SteppedMethod, call_frozen, full_precision, pair, with_crops

_BYOL_MOMENTUM = Cosine(0.99, 1.0)
_DINO_MOMENTUM = Cosine(0.996, 1.0)
#: Forward passes of one optimiser step whose centers are kept.
_MOST_PASSES = 1024


class TaughtMethod(SteppedMethod):
    """A student and a teacher, which starts equal to it and follows it at each optimiser step, backbone and head.

    lightly moves the teacher at the start of the next forward pass instead, which is the same.

    Args:
        backbone, feature_dim, projector: see :class:`LightlyMethod`.
        teacher_projector: the teacher's head, of the same architecture; its weights do not matter.
        momentum: fraction of the teacher that is kept at each step.
        allow_low_momentum: permit a momentum below 0.5.
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int,
        projector: nn.Module,
        teacher_projector: nn.Module,
        momentum: Schedule,
        allow_low_momentum: bool,
    ) -> None:
        check_momentum(momentum, allow_low_momentum)
        super().__init__(backbone, feature_dim, projector)
        self.momentum = momentum
        self.teacher = Encoder(copy.deepcopy(backbone), teacher_projector, feature_dim).requires_grad_(False)
        copy_module(self.encoder, self.teacher)

    def prepare(self) -> None:
        """Make the teacher equal to the student, into which weights may have been loaded."""
        if self.steps == 0:
            copy_module(self.encoder, self.teacher)

    def on_step(self, staged: list[tuple[Tensor, ...]]) -> None:
        """Move the teacher."""
        _, students, teachers = zip(*pair_parameters(self.encoder, self.teacher), strict=True)
        ema(teachers, students, value_at(self.momentum, self.steps, self.total_steps))

    @torch.no_grad()
    def _teach(self, images: Tensor) -> Tensor:
        projections: Tensor = self.teacher(images)
        return projections

    def metrics(self) -> dict[str, float]:
        """Return loss, spread and effective rank of the last projections, and the momentum."""
        metrics = super().metrics()
        return {**metrics, "momentum": value_at(self.momentum, self.steps, self.total_steps)} if metrics else metrics


class BYOL(TaughtMethod):
    """BYOL (Grill et al. 2020, arXiv:2006.07733): predict the teacher's projection of the other view.

    Args:
        backbone: images -> (N, feature_dim).
        feature_dim: width of the backbone's features.
        projection_dim: D; 256.
        hidden_dim: width of the hidden layers of projection and prediction head; 4096.
        momentum: fraction of the teacher that is kept at each step; 0.99 to 1 by cosine, the authors' for 100 epochs.
        allow_low_momentum: permit a momentum below 0.5.
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int,
        projection_dim: int = 256,
        hidden_dim: int = 4096,
        momentum: Schedule = _BYOL_MOMENTUM,
        allow_low_momentum: bool = False,
    ) -> None:
        heads = lightly("models.modules")
        projector = heads.BYOLProjectionHead(feature_dim, hidden_dim, projection_dim)
        super().__init__(backbone, feature_dim, projector, copy.deepcopy(projector), momentum, allow_low_momentum)
        self.predictor = heads.BYOLPredictionHead(projection_dim, hidden_dim, projection_dim)
        self.criterion = lightly("loss").NegativeCosineSimilarity()

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        """Return the loss of two views of a batch, each (N, C, H, W); 0-dim."""
        first, second = pair(views)
        self._begin()
        t0, t1 = self._teach(first), self._teach(second)  # N x D each
        p0, p1 = (self.predictor(self.encoder(view)) for view in (first, second))
        # Twice the cosine is the squared distance of unit vectors, up to a constant; summed over the two directions.
        loss = 2 * full_precision(self.criterion, t0, p1) + 2 * full_precision(self.criterion, t1, p0)
        self._end(loss, p0)
        return loss


class DINO(TaughtMethod):
    """DINO (Caron et al. 2021, arXiv:2104.14294) with two views: match the teacher's soft assignment of the other view.

    The features are the teacher's, as in the paper and in lightly's benchmark.

    Args:
        backbone: images -> (N, feature_dim).
        feature_dim: width of the backbone's features.
        projection_dim: number of assignments; 65536.
        hidden_dim: width of the head's hidden layers; 2048.
        bottleneck_dim: width of the head before its last layer; 256.
        batch_norm: BatchNorm in the head; False.
        momentum: fraction of the teacher that is kept at each step; 0.996 to 1 by cosine.
        student_temperature, teacher_temperature: 0.1 and 0.04.
        center_momentum: fraction of the center of the teacher's outputs that is kept at each step; 0.9.
        frozen: fraction of the training during which the head's last layer stays as it is; 0.01, the first of lightly's
            100 epochs. Without effect while ``total_steps`` is unknown.
        allow_low_momentum: permit a momentum below 0.5.
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int,
        projection_dim: int = 65536,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        batch_norm: bool = False,
        momentum: Schedule = _DINO_MOMENTUM,
        student_temperature: float = 0.1,
        teacher_temperature: float = 0.04,
        center_momentum: float = 0.9,
        frozen: float = 0.01,
        allow_low_momentum: bool = False,
    ) -> None:
        head = lightly("models.modules").DINOProjectionHead
        with warnings.catch_warnings():  # lightly's head uses torch.nn.utils.weight_norm, which torch deprecates
            warnings.simplefilter("ignore", FutureWarning)
            heads = [head(feature_dim, hidden_dim, bottleneck_dim, projection_dim, batch_norm) for _ in range(2)]
        super().__init__(backbone, feature_dim, heads[0], heads[1], momentum, allow_low_momentum)
        self.criterion = lightly("loss").DINOLoss(
            projection_dim,
            warmup_teacher_temp=teacher_temperature,
            teacher_temp=teacher_temperature,
            student_temp=student_temperature,
            center_momentum=center_momentum,
        )
        self.frozen = frozen

    @property
    def embedding_backbone(self) -> nn.Module:
        """The backbone whose features count: the teacher's."""
        return self.teacher.backbone

    def embed(self, images: Tensor) -> Tensor:
        """Return the features of the teacher's backbone (N, feature_dim), without the head."""
        return self.teacher.features(images)

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        """Return the loss of two views of a batch, and any local crops, each (N, C, H, W); 0-dim.

        The teacher sees the two views, the student all.
        """
        (first, second), crops = with_crops(views)
        self._begin()
        both = torch.cat([first, second])
        teacher = self._teach(both)  # 2N x D
        frozen = self.steps < self.frozen * (self.total_steps or 0)
        features, head = self.encoder.features(both), self.encoder.projector
        if crops:
            features = torch.cat([features, self.encoder.features(torch.cat(crops))])  # (2 + crops) N x feature_dim
        student = call_frozen(head, "last_layer", features) if frozen else head(features)  # 2N x D
        before = self.criterion.center.clone()
        loss = full_precision(lambda t, s: self.criterion(t.chunk(2), s.chunk(2 + len(crops))), teacher, student)
        # The loss moves the center at once; here that waits for the optimiser step.
        images = torch.full((1,), first.shape[0], device=first.device)
        moved = self.criterion.center[0].clone()  # 1 x D
        self.criterion.center.copy_(before)
        # Features, because logits to prototypes do not tell how far the images are spread.
        self._end(loss, features[: first.shape[0]], moved, images, limit=_MOST_PASSES)
        return loss

    def on_step(self, staged: list[tuple[Tensor, ...]]) -> None:
        """Move teacher and center."""
        super().on_step(staged)
        centers, images = (torch.cat(parts) for parts in zip(*staged, strict=True))  # passes x D, passes
        # All start from the same center, so their mean is the one that the joined batch leads to.
        weights = (images / images.sum()).to(centers.dtype)
        self.criterion.center.copy_((weights @ centers)[None, None])
