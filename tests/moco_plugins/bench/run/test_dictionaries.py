from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moco_plugins.bench.run.dictionaries import EndToEnd, MemoryBank, register_dictionaries
from moco_plugins.core.infonce import info_nce
from moco_plugins.hooks.manager import methods
from moco_plugins.hooks.method import Method


def views(count: int = 6) -> list[torch.Tensor]:
    return [torch.randn(count, 3, 4, 4) for _ in range(2)]


def backbone() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 10))


def bank(**options: object) -> MemoryBank:
    method = MemoryBank(backbone(), 10, projection_dim=5, **options)  # type: ignore[arg-type]
    method.set_dataset_size(20)
    return method


@pytest.mark.parametrize("method", [EndToEnd(backbone(), 10), bank()])
def test_they_are_methods(method: nn.Module) -> None:
    assert isinstance(method, Method)
    assert method(views()).ndim == 0
    assert method.metrics()["loss_reference"] > 0
    assert method.embed(views()[0]).shape == (6, 10)


def test_known_by_name_and_registering_twice_is_harmless() -> None:
    register_dictionaries()
    register_dictionaries()
    assert methods()["end-to-end"][0] == methods()["memory-bank"][0] == "bench"


def test_end_to_end_is_info_nce_over_the_batch_with_gradient_through_both() -> None:
    method, (first, second) = EndToEnd(backbone(), 10, temperature=0.3), views()
    loss = method([first, second])
    q, k = (F.normalize(method.query_encoder(x), dim=1) for x in (first, second))
    assert float(loss.detach()) == pytest.approx(
        float(F.cross_entropy(q @ k.T / 0.3, torch.arange(6)).detach()), rel=1e-5
    )
    one_sided = F.cross_entropy(q @ k.detach().T / 0.3, torch.arange(6))
    weight = method.query_encoder.projector[0].weight
    both, one = torch.autograd.grad(loss, weight)[0], torch.autograd.grad(one_sided, weight)[0]
    assert not torch.allclose(both, one, rtol=1e-2)


def test_memory_bank_never_contrasts_with_the_batch_itself() -> None:
    method, (first, second) = bank(queue_size=1000), views()
    method.on_batch(torch.tensor([3, 5, 7, 9, 11, 13]))
    loss = method([first, second])
    q = F.normalize(method.query_encoder(first), dim=1)
    others = [i for i in range(20) if i not in (3, 5, 7, 9, 11, 13)]
    expected = info_nce(q, method.bank[[3, 5, 7, 9, 11, 13]], method.bank[others], 0.2)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


def test_memory_bank_is_renewed_by_index_once_a_step() -> None:
    method = bank(bank_momentum=0.25)
    optimizer = torch.optim.SGD(method.parameters(), 0.1)
    before = method.bank.clone()
    pair, indices = views(), torch.tensor([4, 0, 19, 2, 8, 1])
    fresh = method.encode(pair[0]).detach()
    expected = F.normalize(0.25 * before[indices] + 0.75 * fresh, dim=1)
    method.on_batch(indices)
    method(pair).backward()
    assert torch.equal(method.bank, before)
    optimizer.step()
    torch.testing.assert_close(method.bank[indices], expected)
    kept = [i for i in range(20) if i not in indices.tolist()]
    assert torch.equal(method.bank[kept], before[kept])
    after = method.bank.clone()
    optimizer.step()
    assert torch.equal(method.bank, after)


def test_memory_bank_starts_with_the_features_of_the_untrained_encoder() -> None:
    method = bank()
    pictures = torch.rand(20, *views()[0].shape[1:])
    state = {name: value.clone() for name, value in method.state_dict().items() if name != "bank"}
    asked: list[int] = []

    def images(rows: Sequence[int]) -> Tensor:
        asked.extend(rows)
        return pictures[list(rows)]

    method.see_dataset(images, batch_size=20)
    assert sorted(asked) == list(range(20))
    assert all(torch.equal(value, method.state_dict()[name]) for name, value in state.items())
    torch.testing.assert_close(method.bank, method.encode(pictures).detach())


def test_evaluation_changes_nothing_and_the_bank_is_in_the_state() -> None:
    method = bank().eval()
    method.on_batch(torch.arange(6))
    state = copy.deepcopy(method.state_dict())
    method(views())
    assert method._staged is None
    assert all(torch.equal(value, method.state_dict()[name]) for name, value in state.items())
    other = bank()
    other.load_state_dict(state)
    assert torch.equal(other.bank, method.bank)


def test_negatives_are_drawn_when_the_bank_is_larger_than_the_queue() -> None:
    method = bank(queue_size=7)
    method.on_batch(torch.arange(6))
    method(views())
    assert method.metrics()["loss_reference"] == pytest.approx(torch.log(torch.tensor(8.0)).item())


@pytest.mark.parametrize("option", [{"temperature": 0.0}, {"bank_momentum": 1.0}])
def test_bad_input(option: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        bank(**option)
