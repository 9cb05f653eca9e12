"""Methods that embed two views with one encoder and compare the embeddings: SimCLR, Barlow Twins, VICReg."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..frameworks import lightly
from .base import LightlyMethod, full_precision, together


class JointEmbedding(LightlyMethod):
    """One encoder, one criterion of both projections."""

    def __init__(self, backbone: nn.Module, feature_dim: int, projector: nn.Module, criterion: nn.Module) -> None:
        super().__init__(backbone, feature_dim, projector)
        self.criterion = criterion

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        """Return the loss of two views of a batch, each (N, C, H, W); 0-dim."""
        z0, z1 = together(self.encoder, views)  # N x D each
        loss = full_precision(self.criterion, z0, z1)
        self._remember(loss, z0)
        return loss


class SimCLR(JointEmbedding):
    """SimCLR (Chen et al. 2020, arXiv:2002.05709): the other images of the batch, of all ranks, are the negatives.

    Args:
        backbone: images -> (N, feature_dim).
        feature_dim: width of the backbone's features.
        projection_dim: D; 128.
        hidden_dim: width of the head's hidden layer; 2048.
        projection_layers: linear layers of the head; 2.
        temperature: T; 0.1.
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int,
        projection_dim: int = 128,
        hidden_dim: int = 2048,
        projection_layers: int = 2,
        temperature: float = 0.1,
    ) -> None:
        heads, losses = lightly("models.modules"), lightly("loss")
        projector = heads.SimCLRProjectionHead(feature_dim, hidden_dim, projection_dim, projection_layers)
        super().__init__(backbone, feature_dim, projector, losses.NTXentLoss(temperature, gather_distributed=True))


class BarlowTwins(JointEmbedding):
    """Barlow Twins (Zbontar et al. 2021, arXiv:2103.03230): the cross-correlation of the two views becomes the identity.

    Args:
        backbone: images -> (N, feature_dim).
        feature_dim: width of the backbone's features.
        projection_dim: D; 8192.
        hidden_dim: width of the head's hidden layers; 8192.
        redundancy_weight: lambda, the weight of the off-diagonal terms; 0.005.
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int,
        projection_dim: int = 8192,
        hidden_dim: int = 8192,
        redundancy_weight: float = 5e-3,
    ) -> None:
        projector = lightly("models.modules").BarlowTwinsProjectionHead(feature_dim, hidden_dim, projection_dim)
        criterion = lightly("loss").BarlowTwinsLoss(redundancy_weight, gather_distributed=True)
        super().__init__(backbone, feature_dim, projector, criterion)


class VICReg(JointEmbedding):
    """VICReg (Bardes et al. 2021, arXiv:2105.04906): invariance, variance and covariance.

    Args:
        backbone: images -> (N, feature_dim).
        feature_dim: width of the backbone's features.
        projection_dim: D; 8192.
        hidden_dim: width of the head's hidden layers; 8192.
        projection_layers: linear layers of the head; 2, as in lightly's benchmark (3 in the paper).
        invariance_weight, variance_weight, covariance_weight: 25, 25 and 1.
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int,
        projection_dim: int = 8192,
        hidden_dim: int = 8192,
        projection_layers: int = 2,
        invariance_weight: float = 25.0,
        variance_weight: float = 25.0,
        covariance_weight: float = 1.0,
    ) -> None:
        head = lightly("models.modules.heads").VICRegProjectionHead
        projector = head(feature_dim, hidden_dim, projection_dim, projection_layers)
        criterion = lightly("loss").VICRegLoss(invariance_weight, variance_weight, covariance_weight)
        super().__init__(backbone, feature_dim, projector, criterion)
