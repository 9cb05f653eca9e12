"""Failures that other implementations have had, each once and for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import small_backbone, small_views
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from moco_plugins import MoCo
from moco_plugins.core.views import AffineViews


def make(backbone: nn.Module | None = None, **options: Any) -> MoCo:
    options = {"queue_size": 40, "projection_dim": 8, "momentum": 0.9, **options}
    return MoCo(backbone or small_backbone(), 16, **options)


def step(moco: MoCo, optimizer: torch.optim.Optimizer, views: Any) -> float:
    loss = moco(views)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["v2", "v2+"])
def test_it_learns(variant: str) -> None:
    # A refactoring of buffers once left a loss that stayed at ln(K + 1) for ever.
    pixels, _ = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16
    backbone = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()
    )
    size = 511
    moco = MoCo(backbone, 128, variant, queue_size=size, projection_dim=32, momentum=0.99, temperature=0.1)
    optimizer = torch.optim.AdamW(moco.parameters(), 3e-3)
    views = AffineViews(rotation=0.1, scale=(0.95, 1.1), shift=0.1, shear=0.1)
    losses = [step(moco, optimizer, views(images[torch.randint(len(images), (128,))])) for _ in range(80)]
    reference = moco.metrics()["loss_reference"]
    assert reference == pytest.approx(torch.log(torch.tensor(512.0)).item())
    assert sum(losses[-10:]) / 10 < 0.5 * reference
    assert moco.metrics()["contrastive_top1"] > 0.2


class Numbers(Dataset[Any]):
    """50 000 images of two views, made on the fly."""

    def __len__(self) -> int:
        return 50_000

    def __getitems__(self, indices: list[int]) -> Any:
        values = torch.tensor(indices, dtype=torch.float32)[:, None] * torch.linspace(0.1, 2, 12)
        return values.sin().view(-1, 3, 2, 2), values.sin().view(-1, 3, 2, 2) + 0.1


@pytest.mark.slow
def test_an_epoch_of_50_000_images_without_drop_last() -> None:
    moco = make(queue_size=65536)
    optimizer = torch.optim.SGD(moco.parameters(), 0.01)
    loader = DataLoader(Numbers(), batch_size=512, collate_fn=list)
    sizes = []
    for views in loader:
        sizes.append(len(views[0]))
        step(moco, optimizer, views)
    assert sizes[-1] == 50_000 % 512 != 0
    assert moco.steps == len(sizes)
    assert int(moco.queue.filled) == 50_000


def test_storage_never_moves() -> None:
    moco = make(small_backbone(batch_norm=True), variant="v2+", queue_size=20)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)

    def addresses() -> list[int]:
        tensors = [*moco.parameters(), *moco.buffers(), moco.queue.keys, moco.queue.ptr, moco.queue.filled]
        return [tensor.data_ptr() for tensor in tensors]

    before = addresses()
    for n in (8, 30, 5):
        step(moco, optimizer, small_views(n, torch.float32))
    moco.load_state_dict(moco.state_dict())
    assert addresses() == before


@pytest.mark.parametrize("variant", ["v2", "v2+"])
def test_one_bad_image_does_not_poison_the_loss_of_the_steps_after_it(variant: str) -> None:
    moco = make(variant=variant, momentum=0.99)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    step(moco, optimizer, small_views(8, torch.float32))
    views = small_views(8, torch.float32)
    views[1][2] = torch.inf
    with torch.no_grad():  # its own loss is not finite, and the step is not taken
        assert not torch.isfinite(moco(views))
    loss = moco(views)
    loss.backward()
    for parameter in moco.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    assert int(moco.queue.skipped) == 1
    for _ in range(6):
        assert torch.isfinite(torch.tensor(step(moco, optimizer, small_views(8, torch.float32))))


def test_bad_query_of_a_step_that_is_taken_breaks_the_weights_and_not_the_queue() -> None:
    moco = make()
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    views = small_views(8, torch.float32)
    views[0][2] = torch.nan
    step(moco, optimizer, views)
    step(moco, optimizer, small_views(8, torch.float32))
    assert torch.isfinite(moco.queue.keys).all()


class SomeZeros(nn.Module):
    """A backbone that gives nothing for dark images, as dead ReLUs do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 16)

    def forward(self, images: Tensor) -> Tensor:
        lit = (images.flatten(1).abs().sum(1, keepdim=True) > 0).to(images.dtype)
        return self.linear(images.flatten(1)) * lit


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["v1", "v2", "v2+"])
def test_a_row_of_zeros_gives_a_finite_loss_and_a_harmless_gradient(variant: str, dtype: torch.dtype | None) -> None:
    moco = make(SomeZeros(), variant=variant)
    for module in moco.query_encoder.projector:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    views = small_views(8, torch.float32)
    views[0][3] = 0
    views[1][5] = 0
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = moco(views)
    loss.backward()
    assert torch.isfinite(loss)
    for name, parameter in moco.named_parameters():
        if parameter.grad is not None:
            assert torch.isfinite(parameter.grad).all(), name
            assert float(parameter.grad.abs().max()) < 1e3, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["v1", "v2+", "v3"])
def test_under_autocast_loss_and_queue_are_float32(variant: str, dtype: torch.dtype) -> None:
    moco = make(variant=variant, temperature=0.07, hidden_dim=12, queue_size=0 if variant == "v3" else 40)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    for _ in range(3):
        views = small_views(8, torch.float32)
        with torch.autocast("cpu", dtype=dtype):
            loss = moco(views)
            loss.backward()
            optimizer.step()  # within autocast, as some loops do
        optimizer.zero_grad()
        assert loss.dtype == torch.float32
        assert torch.isfinite(loss)
    assert all(p.dtype == torch.float32 for p in moco.parameters())
    if moco.queue is not None:
        assert moco.queue.keys.dtype == torch.float32
        norms = moco.queue.ordered().norm(dim=1)
        assert torch.allclose(norms, torch.ones_like(norms), atol=1e-5)


def test_keys_are_normalised_in_float32_under_autocast() -> None:
    moco = make(momentum=1.0)
    optimizer = torch.optim.SGD(moco.parameters(), 0.0)
    views = small_views(8, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moco(views).backward()
        with torch.no_grad():
            projected = moco.key_encoder(views[1])
    optimizer.step()
    assert torch.allclose(moco.queue.ordered(), F.normalize(projected.float(), dim=1), atol=1e-6)


def test_starting_loss_with_real_keys_only_is_that_of_the_keys_there_are() -> None:
    # A random queue makes the loss start low and rise at first, which people take for a failure.
    moco = make(queue_fill="empty")
    optimizer = torch.optim.SGD(moco.parameters(), 0.0)
    assert step(moco, optimizer, small_views(8, torch.float32)) == 0  # nothing to contrast with yet
    assert moco.metrics()["loss_reference"] == 0
    step(moco, optimizer, small_views(8, torch.float32))
    assert moco.metrics()["loss_reference"] == pytest.approx(torch.log(torch.tensor(9.0)).item())


def test_training_goes_on_after_validation_as_if_there_had_been_none() -> None:
    states = []
    for validate in (False, True):
        torch.manual_seed(2)
        moco = make(small_backbone(batch_norm=True), variant="v2+")
        optimizer = torch.optim.SGD(moco.parameters(), 0.1)
        batches = [small_views(16, torch.float32) for _ in range(6)]
        for number, views in enumerate(batches):
            step(moco, optimizer, views)
            if validate and number % 2:
                moco.eval()
                with torch.no_grad():
                    moco(batches[0])
                    moco.embed(batches[1][0])
                moco.train()
        states.append(moco.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_probe_trained_on_the_features_beside_the_method_is_no_step_of_it() -> None:
    # An online linear probe in the same optimiser: one optimiser, one step.
    moco, probe = make(), nn.Linear(16, 10)
    optimizer = torch.optim.SGD([*moco.parameters(), *probe.parameters()], 0.1)
    for _ in range(4):
        views = small_views(8, torch.float32)
        loss = moco(views) + F.cross_entropy(probe(moco.embed(views[0]).detach()), torch.zeros(8, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert moco.steps == 4
    assert int(moco.queue.filled) == 32


def test_activation_checkpointing_stages_keys_once() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_backbone()

        def forward(self, images: Tensor) -> Tensor:
            return checkpoint(self.inner, images, use_reentrant=False)

    moco = make(Checkpointed())
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    step(moco, optimizer, small_views(8, torch.float32))
    assert int(moco.queue.filled) == 8
    assert moco.steps == 1
