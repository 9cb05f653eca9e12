"""The other two dictionaries of the MoCo paper's figure 2, on equal terms with MoCo: end-to-end and memory bank.

Same backbone, head, loss and temperature; only where the keys come from differs (arXiv:1911.05722, section 3.2).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from ...core import diagnostics
from ...core.encoder import Encoder
from ...core.infonce import info_nce
from ...core.variants import V2, projection_head
from ...hooks import manager as plugins
from ...hooks.specs import hookimpl
from ...steps import distributed, follow


class _Contrastive(nn.Module):
    """An encoder with MoCo v2's head, and what all methods offer."""

    def __init__(
        self, backbone: nn.Module, feature_dim: int, projection_dim: int, hidden_dim: int | None, temperature: float
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be greater than 0 (0.2 in MoCo v2)")
        head = projection_head(feature_dim, hidden_dim or feature_dim, projection_dim, V2.projection_layers, False)
        self.query_encoder = Encoder(backbone, head, feature_dim)
        self.feature_dim, self.temperature = feature_dim, temperature
        self.total_steps: int | None = None
        self._last: diagnostics.LastStep | None = None

    def encode(self, images: Tensor) -> Tensor:
        """Encode and normalise: (N, D)."""
        return F.normalize(self.query_encoder(images).float(), dim=1)

    def embed(self, images: Tensor) -> Tensor:
        """Return the features of the backbone (N, feature_dim), without the head."""
        return self.query_encoder.features(images)

    def metrics(self) -> dict[str, float]:
        """Return what the last forward pass can tell."""
        return {} if self._last is None else diagnostics.describe(self._last, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}


class EndToEnd(_Contrastive):
    """Figure 2(a): queries and keys by one encoder, gradients through both; negatives are the other keys of the batch.

    The dictionary is as large as the batch, and every key is fresh.

    Args:
        backbone: images -> (N, feature_dim).
        feature_dim: width of the backbone's features.
        projection_dim: D; 128.
        hidden_dim: width of the head's hidden layer; None: feature_dim.
        temperature: T; 0.2, as in MoCo v2.
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int,
        projection_dim: int = V2.projection_dim,
        hidden_dim: int | None = V2.hidden_dim,
        temperature: float = V2.temperature,
    ) -> None:
        super().__init__(backbone, feature_dim, projection_dim, hidden_dim, temperature)

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        """Return the loss of two views of a batch, each (N, C, H, W); 0-dim."""
        query, key = self.encode(views[0]), self.encode(views[1])  # N x D each
        loss = info_nce(query, key, key[:0], self.temperature, in_batch_negatives=True)
        self._last = diagnostics.LastStep(
            loss.detach(), query.detach(), [key.detach()], self.temperature, len(key) - 1, in_batch=True
        )
        return loss


class MemoryBank(_Contrastive):
    """Figure 2(b): one stored feature for each image of the training set, as old as the image's last turn.

    All keys come from the bank: the positive is the image's own row, negatives are drawn from the rows of the images that
    are not in the batch. Only the first view is encoded. After each optimiser step the rows of the batch move to the new
    features (Wu et al. 2018, arXiv:1805.01978, section 3.2 and 3.3). The bank starts with the features of the untrained
    encoder, see :meth:`see_dataset`; the authors start with random vectors, towards which the encoder is then drawn for
    an epoch: nothing in their 200 epochs, much in a few.

    Args:
        backbone: images -> (N, feature_dim).
        feature_dim: width of the backbone's features.
        bank_size: number of training images; the harness sets it with :meth:`set_dataset_size`.
        queue_size: negatives drawn for each step; 65536, at most the bank.
        projection_dim: D; 128.
        hidden_dim: width of the head's hidden layer; None: feature_dim.
        temperature: T; 0.2.
        bank_momentum: fraction of a stored feature that is kept when it is renewed; 0.5, as in the authors' code.
    """

    bank: Tensor

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int,
        bank_size: int = 1,
        queue_size: int = V2.queue_size,
        projection_dim: int = V2.projection_dim,
        hidden_dim: int | None = V2.hidden_dim,
        temperature: float = V2.temperature,
        bank_momentum: float = 0.5,
    ) -> None:
        super().__init__(backbone, feature_dim, projection_dim, hidden_dim, temperature)
        if not 0 <= bank_momentum < 1:
            raise ValueError(f"bank_momentum={bank_momentum} must lie in [0, 1)")
        self.queue_size, self.bank_momentum = queue_size, bank_momentum
        self.register_buffer("bank", F.normalize(torch.randn(bank_size, projection_dim), dim=1))
        self._indices: Tensor | None = None
        self._staged: tuple[Tensor, Tensor] | None = None
        follow.follow_optimizer_steps(self)

    def set_dataset_size(self, size: int) -> None:
        """Make a bank of one random unit vector for each of ``size`` images."""
        self.bank = F.normalize(torch.randn(size, self.bank.shape[1]), dim=1)

    @torch.no_grad()
    def see_dataset(self, images: Callable[[Sequence[int]], Tensor], batch_size: int = 256) -> None:
        """Fill the bank before the training; ``images`` gives images by their numbers, (N, C, H, W)."""
        before = {name: buffer.clone() for name, buffer in self.query_encoder.named_buffers()}
        count = len(self.bank)
        for rows in torch.randperm(count).tensor_split(math.ceil(count / batch_size)):
            self.bank[rows] = self.encode(images(rows.tolist()))
        for name, buffer in self.query_encoder.named_buffers():  # nothing has been trained yet
            buffer.copy_(before[name])

    def on_batch(self, indices: Tensor) -> None:
        """Take the image numbers of the batch that comes next."""
        self._indices = indices

    def forward(self, views: Sequence[Tensor]) -> Tensor:
        """Return the loss of a batch, views (N, C, H, W) each; 0-dim.

        Where the image numbers are not known (:meth:`on_batch`), the other view's feature is the positive.
        """
        query = self.encode(views[0])  # N x D
        if self._indices is not None and len(self._indices) == len(query):
            key = self.bank[self._indices.to(self.bank.device)]
        else:
            with torch.no_grad():
                key = self.encode(views[1])
        negatives = self._draw(query)
        loss = info_nce(query, key, negatives, self.temperature)
        self._last = diagnostics.LastStep(
            loss.detach(), query.detach(), [key], self.temperature, len(negatives), in_batch=False
        )
        if self.training and loss.requires_grad and self._indices is not None:
            self._staged = (self._indices.to(query.device), query.detach())
        return loss

    @torch.no_grad()
    def _draw(self, query: Tensor) -> Tensor:
        free = torch.ones(len(self.bank), dtype=torch.bool, device=self.bank.device)
        if self._indices is not None:
            free[self._indices.to(free.device)] = False
        rows = free.nonzero()[:, 0]
        if self.training and len(rows) > self.queue_size:
            rows = rows[torch.randperm(len(rows), device=rows.device)[: self.queue_size]]
        return self.bank[rows]

    @torch.no_grad()
    def after_optimizer_step(self, optimizer: Optimizer) -> None:
        """Renew the bank's rows of the batch, on all ranks alike."""
        owned = follow.parameter_ids(optimizer)
        if self._staged is None or owned.isdisjoint(map(id, self.query_encoder.parameters())):
            return
        (indices, keys), self._staged = self._staged, None
        rows, fresh = torch.cat(distributed.gather_rows(indices)), torch.cat(distributed.gather_rows(keys))
        mixed = self.bank_momentum * self.bank[rows] + (1 - self.bank_momentum) * fresh
        self.bank[rows] = F.normalize(mixed, dim=1)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_staged": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        follow.follow_optimizer_steps(self)


@hookimpl
def moco_methods() -> Mapping[str, Callable[..., nn.Module]]:
    """The paper's two alternatives to MoCo."""
    return {"end-to-end": EndToEnd, "memory-bank": MemoryBank}


def register_dictionaries() -> None:
    """Make the two known by name, through the same door as everybody's methods."""
    if not plugins.manager().has_plugin("bench"):
        plugins.register(sys.modules[__name__], "bench")
