"""InfoNCE against the formula of the paper, fused and dense alike."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moco_plugins import info_nce

BOTH = pytest.mark.parametrize("implementation", ["fused", "dense", "auto"])


def unit(n: int, dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return F.normalize(torch.randn(n, dim, dtype=torch.float64), dim=1).to(dtype)


def by_hand(query: Tensor, positive: Tensor, negatives: Tensor, temperature: Tensor | float, in_batch: bool) -> Tensor:
    """Equation 1, query by query: minus the log of the positive's share."""
    losses = []
    for i, q in enumerate(query):
        others = [k for j, k in enumerate(positive) if j != i] if in_batch else []
        wrong = torch.stack([*negatives, *others]) if len(negatives) or others else negatives
        right = (q @ positive[i] / temperature).exp()
        losses.append(-torch.log(right / (right + (wrong @ q / temperature).exp().sum())))
    return torch.stack(losses).mean()


@BOTH
@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize(("n", "k", "d"), [(1, 1, 1), (3, 7, 5), (33, 130, 96), (17, 1, 128), (5, 300, 3)])
def test_loss_and_gradients_are_the_formulas(n: int, k: int, d: int, in_batch: bool, implementation: str) -> None:
    positive, negatives = unit(n, d), unit(k, d)
    query, t = unit(n, d).requires_grad_(), torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    expected = by_hand(query, positive, negatives, t, in_batch)
    wanted = torch.autograd.grad(expected, (query, t))
    loss = info_nce(query, positive, negatives, t, in_batch, implementation)
    got = torch.autograd.grad(3 * loss, (query, t))
    assert loss.shape == ()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.allclose(ours / 3, theirs, atol=1e-11)


@pytest.mark.parametrize("in_batch", [False, True])
def test_numerical_gradient(in_batch: bool) -> None:
    positive, negatives = unit(4, 6), unit(9, 6)
    query, t = unit(4, 6).requires_grad_(), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    for implementation in ("fused", "dense"):
        assert torch.autograd.gradcheck(
            lambda q, temp, how=implementation: info_nce(q, positive, negatives, temp, in_batch, how), (query, t)
        )


@pytest.mark.parametrize(("n", "k", "d"), [(8, 64, 16), (33, 1000, 96), (256, 4096, 128), (64, 6000, 128)])
@pytest.mark.parametrize("temperature", [0.01, 0.07, 0.2, 1.0])
def test_fused_equals_dense_in_float32(n: int, k: int, d: int, temperature: float) -> None:
    positive, negatives = unit(n, d, torch.float32), unit(k, d, torch.float32)
    results = []
    for implementation in ("fused", "dense"):
        query = F.normalize(positive + 0.3, dim=1).requires_grad_()
        loss = info_nce(query, positive, negatives, temperature, True, implementation)
        loss.backward()
        results.append((loss.detach(), query.grad))
    (loss_a, grad_a), (loss_b, grad_b) = results
    assert torch.allclose(loss_a, loss_b, rtol=1e-5, atol=1e-6)
    assert float((grad_a - grad_b).norm() / grad_b.norm()) < 1e-5


@BOTH
def test_several_banks_are_as_good_as_one(implementation: str) -> None:
    query, positive, bank = unit(5, 8), unit(5, 8), unit(40, 8)
    whole = info_nce(query, positive, bank, 0.1, True, implementation)
    parts = info_nce(query, positive, [bank[:13], bank[13:13], bank[13:]], 0.1, True, implementation)
    assert float(whole) == pytest.approx(float(parts), abs=1e-12)


def test_no_negatives_at_all_is_a_loss_of_zero_and_in_batch_alone_works() -> None:
    query, positive, none = unit(5, 8).requires_grad_(), unit(5, 8), torch.zeros(0, 8, dtype=torch.float64)
    loss = info_nce(query, positive, none, 0.2)
    loss.backward()
    assert float(loss.detach()) == 0
    assert float(query.grad.abs().max()) == 0
    assert float(info_nce(query, positive, [], 0.2, True).detach()) == pytest.approx(
        float(by_hand(query, positive, none, 0.2, True).detach()), abs=1e-12
    )
    # One image has no other key in its batch.
    assert float(info_nce(query[:1], positive[:1], none, 0.2, True).detach()) == pytest.approx(0, abs=1e-12)


def test_loss_of_features_that_tell_nothing_is_ln_of_the_number_of_keys() -> None:
    same = torch.ones(6, 4) / 2
    assert float(info_nce(same, same, same[:1].expand(99, 4), 0.07)) == pytest.approx(math.log(100), abs=1e-4)
    assert float(info_nce(same, same, same[:1].expand(99, 4), 0.07, True)) == pytest.approx(math.log(105), abs=1e-4)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_queries_against_a_float32_queue_are_computed_in_float32(
    dtype: torch.dtype, implementation: str
) -> None:
    query, positive, negatives = unit(16, 32, dtype), unit(16, 32, dtype), unit(200, 32, torch.float32)
    expected = info_nce(query.double(), positive.double(), negatives.double(), 0.07)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = info_nce(query.requires_grad_(), positive, negatives, 0.07, implementation=implementation)
    loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected), abs=1e-5)
    assert query.grad.dtype == dtype
    assert torch.isfinite(query.grad).all()


@BOTH
def test_half_precision_throughout_stays_near_the_exact_loss(implementation: str) -> None:
    query, positive, negatives = (unit(n, 64, torch.bfloat16) for n in (16, 16, 500))
    expected = info_nce(query.double(), positive.double(), negatives.double(), 0.2)
    loss = info_nce(query, positive, negatives, 0.2, implementation=implementation)
    assert float(loss) == pytest.approx(float(expected), abs=0.05)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_zero_rows_give_a_finite_loss_and_gradient(dtype: torch.dtype, implementation: str) -> None:
    query, positive, negatives = (unit(n, 16, dtype) for n in (4, 4, 10))
    query[1], positive[2], negatives[3] = 0, 0, 0
    query.requires_grad_()
    loss = info_nce(query, positive, negatives.float(), 0.07, implementation=implementation)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(query.grad).all()


@BOTH
def test_extreme_temperatures_do_not_overflow(implementation: str) -> None:
    query, positive, negatives = (unit(n, 16, torch.float32) for n in (4, 4, 10))
    for temperature in (1e-4, 1e4):
        leaf = query.clone().requires_grad_()
        loss = info_nce(leaf, positive, negatives, temperature, implementation=implementation)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(leaf.grad).all()
    assert float(loss.detach()) == pytest.approx(math.log(11), abs=1e-3)


@BOTH
def test_layout_of_the_inputs_does_not_matter(implementation: str) -> None:
    query, positive, negatives = (unit(n, 6) for n in (4, 4, 10))
    expected = float(info_nce(query, positive, negatives, 0.2, implementation=implementation))
    strided = torch.stack([query, query], 2)[:, :, 0]
    rows = positive.repeat_interleave(2, 0)[::2]
    columns = negatives.T.contiguous().T  # a queue stored as (D, K), transposed
    assert float(info_nce(strided, rows, columns, 0.2, implementation=implementation)) == pytest.approx(expected)


def test_gradient_for_keys_falls_back_to_the_dense_formula() -> None:
    query, positive, negatives = (unit(n, 6).requires_grad_() for n in (4, 4, 10))
    expected = torch.autograd.grad(by_hand(query, positive, negatives, 0.2, True), (query, positive, negatives))
    got = torch.autograd.grad(info_nce(query, positive, negatives, 0.2, True), (query, positive, negatives))
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)
    with torch.no_grad():  # no gradient is asked for: any implementation will do
        assert torch.isfinite(info_nce(query, positive, negatives, 0.2, implementation="fused"))


def test_backward_twice_with_retained_graph_gives_the_same_gradient_twice() -> None:
    query, positive, negatives = unit(4, 6).requires_grad_(), unit(4, 6), unit(10, 6)
    loss = info_nce(query, positive, negatives, 0.2, implementation="fused")
    loss.backward(retain_graph=True)
    once = query.grad.clone()
    loss.backward()
    assert torch.allclose(query.grad, 2 * once)


def test_gradient_stays_that_of_its_own_negatives_when_the_queue_is_overwritten_before_backward() -> None:
    for implementation in ("fused", "auto"):
        query, positive, negatives = unit(4, 6).requires_grad_(), unit(4, 6), unit(10, 6)
        expected = torch.autograd.grad(by_hand(query, positive, negatives.clone(), 0.2, False), query)[0]
        loss = info_nce(query, positive, negatives, 0.2, implementation=implementation)
        negatives.zero_()
        loss.backward()
        assert torch.allclose(query.grad, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.randn(6)}, r"query.*\(6,\).*\(N, D\)"),
        ({"query": torch.randn(0, 6), "positive": torch.randn(0, 6)}, r"query.*\(0, 6\)"),
        ({"query": torch.randn(4, 6, 1)}, r"query.*\(4, 6, 1\)"),
        ({"positive": torch.randn(3, 6)}, r"positive.*\(3, 6\).*\(4, 6\)"),
        ({"positive": torch.randn(4, 5)}, r"positive.*\(4, 5\).*\(4, 6\)"),
        ({"negatives": torch.randn(10, 5)}, r"negatives.*\(10, 5\).*\(K, 6\)"),
        ({"negatives": torch.randn(6, 10)}, r"negatives.*\(6, 10\).*transposed"),
        ({"negatives": [torch.randn(2, 6), torch.randn(6)]}, r"negatives.*\(6,\)"),
        ({"negatives": torch.ones(10, 6, dtype=torch.long)}, "negatives.*int64.*floating"),
        ({"query": torch.ones(4, 6, dtype=torch.long)}, "query.*int64.*floating"),
        ({"temperature": 0}, "temperature=0.*greater than 0"),
        ({"temperature": -0.2}, "temperature=-0.2.*greater than 0"),
        ({"temperature": math.nan}, "temperature=nan.*greater than 0"),
        ({"temperature": torch.ones(2)}, r"temperature.*\(2,\)"),
        ({"implementation": "flash"}, "implementation='flash'.*auto, fused, dense"),
        ({"positive": torch.randn(4, 6).requires_grad_(), "implementation": "fused"}, "fused.*positive.*dense"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_input(change: dict[str, object], message: str) -> None:
    good = {
        "query": torch.randn(4, 6).requires_grad_(),
        "positive": torch.randn(4, 6),
        "negatives": torch.randn(10, 6),
        "temperature": 0.2,
    }
    with pytest.raises(ValueError, match=message):
        info_nce(**{**good, **change})
