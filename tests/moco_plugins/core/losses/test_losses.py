"""Each loss against the formula of its paper, written out with the whole (N, K) matrix."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moco_plugins import info_nce
from moco_plugins.core.contrast import class_sums
from moco_plugins.core.logsumexp import logsumexp, softmax_mean
from moco_plugins.core.losses.mochi import mochi
from moco_plugins.hooks import manager as plugins

T, N, K, D = 0.2, 12, 90, 16


def unit(n: int, dim: int = D, dtype: torch.dtype = torch.float64) -> Tensor:
    return F.normalize(torch.randn(n, dim, dtype=torch.float64), dim=1).to(dtype)


def matrix(q: Tensor, k: Tensor, n: Tensor, in_batch: bool, same: Tensor) -> Tensor:
    """exp(q·n / T) of each query with each of its negatives; 0 where it is left out."""
    wrong = (q @ n.T / T).exp().masked_fill(same, 0)
    if in_batch:
        batch = (q @ k.T / T).exp().masked_fill(torch.eye(len(q), dtype=torch.bool), 0)
        wrong = torch.cat([wrong, batch], 1)
    return wrong


def plain_info_nce(pos: Tensor, neg: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return -torch.log(pos / (pos + neg.sum(1))).mean()


def plain_decoupled(pos: Tensor, neg: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return -torch.log(pos / neg.sum(1)).mean()


def plain_debiased(pos: Tensor, neg: Tensor, q: Tensor, k: Tensor, c: float = 0.1) -> Tensor:
    count = (neg > 0).sum(1)
    g = ((neg.sum(1) / count - c * pos) / (1 - c)).clamp_min(math.exp(-1 / T))
    return -torch.log(pos / (pos + count * g)).mean()


def plain_hard(pos: Tensor, neg: Tensor, q: Tensor, k: Tensor, c: float = 0.1, beta: float = 1.0) -> Tensor:
    count = (neg > 0).sum(1)
    importance = neg**beta
    weights = importance / (importance.sum(1, keepdim=True) / count[:, None])
    g = (((weights * neg).sum(1) / count - c * pos) / (1 - c)).clamp_min(math.exp(-1 / T))
    return -torch.log(pos / (pos + count * g)).mean()


PLAIN = {"info_nce": plain_info_nce, "decoupled": plain_decoupled, "debiased": plain_debiased, "hard": plain_hard}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("implementation", ["fused", "dense"])
def test_loss_and_gradient_are_the_papers(name: str, in_batch: bool, known: bool, implementation: str) -> None:
    k, n = unit(N), unit(K)
    ids, of_keys = torch.arange(N), torch.full((K,), -1)
    ids[-1] = -1  # nobody knows it: it meets everything
    if known:
        of_keys[10:40] = torch.arange(30) % N
        n[10:40] = F.normalize(n[10:40] + 3 * k[of_keys[10:40]], dim=1)  # the most similar of all
    same = (ids[:, None] == of_keys[None]) & (ids[:, None] >= 0)
    results = []
    for ours in (True, False):
        torch.manual_seed(5)
        q = F.normalize(k + 0.5 * unit(N), dim=1).requires_grad_()
        if ours:
            named = {"ids": ids, "negative_ids": of_keys} if known else {}
            loss = plugins.build_loss(name, {"implementation": implementation})(q, k, n, T, in_batch, **named)
        else:
            loss = PLAIN[name](((q * k).sum(1) / T).exp(), matrix(q, k, n, in_batch, same & known), q, k)
        loss.backward()
        results.append((loss.detach(), q.grad))
    assert float(results[0][0]) == pytest.approx(float(results[1][0]), abs=1e-10)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-10)


def test_debiased_is_floored_where_the_positive_outweighs_all_and_infonce_without_a_prior() -> None:
    k = unit(N)
    far = F.normalize(-k.sum(0, keepdim=True) + 0.01 * unit(K), dim=1)
    q = k.clone().requires_grad_()
    loss = plugins.build_loss("debiased", {"class_prior": 0.5})(q, k, far, T)
    loss.backward()
    expected = plain_debiased(((k * k).sum(1) / T).exp(), (k @ far.T / T).exp(), k, k, 0.5)
    assert float(loss.detach()) == pytest.approx(float(expected), abs=1e-10)
    assert torch.isfinite(q.grad).all()
    n = unit(K)
    assert float(plugins.build_loss("debiased", {"class_prior": 0.0})(k, k, n, T)) == pytest.approx(
        float(info_nce(k, k, n, T)), abs=1e-10
    )


def test_hard_without_concentration_is_debiased() -> None:
    q, k, n = unit(N), unit(N), unit(K)
    assert float(plugins.build_loss("hard", {"beta": 0})(q, k, n, T)) == pytest.approx(
        float(plugins.build_loss("debiased", {})(q, k, n, T)), abs=1e-12
    )


@pytest.mark.parametrize("in_batch", [False, True])
def test_ressl_is_the_cross_entropy_of_two_relations(in_batch: bool) -> None:
    q, k, n = unit(N).requires_grad_(), unit(N), unit(K)
    own = torch.eye(N, dtype=torch.bool)
    keys = torch.cat([n, k]) if in_batch else n
    hidden = torch.cat([torch.zeros(N, K, dtype=torch.bool), own], 1) if in_batch else torch.zeros(N, K).bool()
    target = (k @ keys.T / 0.04).masked_fill(hidden, -torch.inf).softmax(1)
    log_p = (q @ keys.T / T).masked_fill(hidden, -torch.inf).log_softmax(1).masked_fill(hidden, 0)
    expected = -(target * log_p).sum(1).mean()
    loss = plugins.build_loss("ressl", {"teacher_temperature": 0.04})(q, k, n, T, in_batch)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-10)
    gradients = [torch.autograd.grad(value, q)[0] for value in (loss, expected)]
    assert torch.allclose(*gradients, atol=1e-10)


def by_hand_supcon(q: Tensor, k: Tensor, n: Tensor, labels: Tensor, of_keys: Tensor, in_batch: bool) -> Tensor:
    losses = []
    for i in range(len(q)):
        everything = [(k[i], True)] + [(n[j], labels[i] >= 0 and of_keys[j] == labels[i]) for j in range(len(n))]
        if in_batch:
            everything += [(k[j], labels[i] >= 0 and labels[j] == labels[i]) for j in range(len(q)) if j != i]
        logits = torch.stack([q[i] @ key / T for key, _ in everything])
        chosen = torch.tensor([bool(is_positive) for _, is_positive in everything])
        losses.append(-logits.log_softmax(0)[chosen].mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("in_batch", [False, True])
@pytest.mark.parametrize("partly", [False, True])
def test_supcon_is_equation_2_with_unlabelled_rows_as_their_own_class(in_batch: bool, partly: bool) -> None:
    q, k, n = unit(N).requires_grad_(), unit(N), unit(K)
    labels, of_keys = torch.randint(0, 4, (N,)), torch.randint(0, 5, (K,))
    if partly:
        labels[:5], of_keys[:40] = -1, -1
    loss = plugins.build_loss("supcon", {})(
        q, k, [n[:30], n[30:]], T, in_batch, labels=labels, negative_labels=[of_keys[:30], of_keys[30:]]
    )
    expected = by_hand_supcon(q, k, n, labels, of_keys, in_batch)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-10)
    gradients = [torch.autograd.grad(value, q)[0] for value in (loss, expected)]
    assert torch.allclose(*gradients, atol=1e-10)


def test_supcon_without_any_label_is_info_nce() -> None:
    q, k, n = unit(N), unit(N), unit(K)
    unlabelled = {"labels": torch.full((N,), -1), "negative_labels": torch.full((K,), -1)}
    for in_batch in (False, True):
        assert float(plugins.build_loss("supcon", {})(q, k, n, T, in_batch, **unlabelled)) == pytest.approx(
            float(info_nce(q, k, n, T, in_batch)), abs=1e-12
        )


def test_class_sums_count_each_key_once() -> None:
    keys, key_labels, labels = unit(50), torch.randint(-1, 6, (50,)), torch.tensor([3, 0, 3, 17, -2])
    sums, numbers = class_sums(keys, key_labels, labels)
    for row, label in enumerate(labels):
        assert torch.allclose(sums[row], keys[key_labels == label].sum(0), atol=1e-12)
        assert numbers[row] == (key_labels == label).sum()


def test_mochi_draws_from_the_hardest_and_mixes_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moco_plugins.core.losses.mochi.BLOCK_ROWS", 17)  # several blocks, several parts of the batch
    monkeypatch.setattr("moco_plugins.core.losses.mochi.BLOCK_NUMBERS", 300)
    q, k, n = unit(N).requires_grad_(), unit(N), unit(K)
    mixed, with_query, hardest = 6, 3, 10
    torch.manual_seed(11)
    loss = mochi(q, k, n, T, hardest=hardest, mixed=mixed, with_query=with_query)
    torch.manual_seed(11)  # the same draws, in the same order
    place = (torch.rand(N, 2 * mixed + with_query) * hardest).long()
    share = torch.rand(N, mixed + with_query, dtype=torch.float64)
    share[:, mixed:] *= 0.5
    hard = n[(q @ n.T).detach().topk(hardest, 1).indices.gather(1, place)]
    a = torch.cat([hard[:, :mixed], q.detach()[:, None].expand(-1, with_query, -1)], 1)
    h = F.normalize(share[:, :, None] * a + (1 - share[:, :, None]) * hard[:, mixed:], dim=2)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ n.T, torch.einsum("nd,nmd->nm", q, h)], 1) / T
    expected = F.cross_entropy(logits, torch.zeros(N, dtype=torch.long))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-10)
    gradients = [torch.autograd.grad(value, q)[0] for value in (loss, expected)]
    assert torch.allclose(*gradients, atol=1e-10)


def test_mochi_mixes_no_false_negative() -> None:
    q = unit(4)
    n = torch.cat([q, q, unit(2)])
    named = {"ids": torch.arange(4), "negative_ids": torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 8, 9])}
    loss = mochi(q, q, n, T, hardest=10, mixed=40, with_query=0, **named)
    # All mixtures are of n_8, n_9 and the images of the others: the largest logit of those bounds each of them.
    others = (q @ n.T).masked_fill(named["ids"][:, None] == named["negative_ids"], -1).amax()
    assert float(loss) < math.log1p(48 * math.exp((float(others.clamp_min(0.0)) * 1.5 - 1) / T)) + 1e-6


def test_a_mask_over_nearly_all_of_the_sum_is_exact_in_float32() -> None:
    """Subtracting what is left out would keep nothing of the rest: e^(1/0.05) against a few small terms."""
    q = unit(32, 64, torch.float32)
    n = torch.cat([q, unit(5000, 64, torch.float32)])
    ids, of_keys = torch.arange(32), torch.cat([torch.arange(32), torch.full((5000,), -1)])
    got = logsumexp(q.requires_grad_(), n, 0.05, ids, of_keys)
    got.sum().backward()
    wide = q.detach().double().requires_grad_()
    logits = (wide @ n.double().T / 0.05).masked_fill(ids[:, None] == of_keys, -torch.inf)
    expected = logits.logsumexp(1)
    expected.sum().backward()
    assert torch.allclose(got.double(), expected, atol=1e-5)
    assert float((q.grad - wide.grad).norm() / wide.grad.norm()) < 1e-5


@pytest.mark.parametrize("implementation", ["fused", "dense"])
def test_query_that_may_meet_no_key_has_a_sum_of_nothing(implementation: str) -> None:
    q, n = unit(3).requires_grad_(), unit(5000)
    ids, of_keys = torch.tensor([7, 1, 2]), torch.full((5000,), 7)
    lse = logsumexp(q, n, T, ids, of_keys, implementation)
    assert lse[0] == -torch.inf
    loss = info_nce(q, unit(3), n, T, implementation=implementation, ids=ids, negative_ids=of_keys)
    loss.backward()
    assert torch.isfinite(q.grad).all()
    assert float(q.grad[0].abs().max()) == 0


def test_primitive_joins_sets_of_keys_and_its_gradient_is_right() -> None:
    q, n = unit(6).requires_grad_(), unit(40)
    t = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    ids, of_keys = torch.arange(6), torch.arange(40) % 9
    sets, numbers = [n[:7], n[7:7], n[7:]], [of_keys[:7], of_keys[7:7], None]
    assert torch.autograd.gradcheck(lambda q, t: logsumexp(q, sets, t, ids, numbers), (q, t))
    fused, dense = (logsumexp(q, sets, t, ids, numbers, how) for how in ("fused", "dense"))
    assert torch.allclose(fused, dense, atol=1e-12)
    mean = softmax_mean(q, n, 0.3)
    assert torch.allclose(mean, (q.detach() @ n.T / 0.3).softmax(1) @ n, atol=1e-12)


@pytest.mark.parametrize("name", ["info_nce", "decoupled", "hard"])
def test_masked_loss_compiles_to_one_graph(name: str) -> None:
    torch._dynamo.reset()
    loss: Callable[..., Tensor] = plugins.build_loss(name, {})
    q, k, n = (unit(rows, dtype=torch.float32) for rows in (8, 8, 64))
    named = {"ids": torch.arange(8), "negative_ids": torch.arange(64) % 20}
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert torch.allclose(loss(q, k, n, T, **named), compiled(q, k, n, T, **named), atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("info_nce", {"beta": 1}, "beta=1 is no option of loss='info_nce'; it has implementation"),
        ("hard", {"bta": 1}, "bta=1 is no option of loss='hard'; it has implementation, beta, class_prior"),
        ("supcon", {"labels": None}, "labels=None is no option"),
    ],
)
def test_options_a_loss_has_not(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        plugins.build_loss(name, options)


@pytest.mark.parametrize(
    ("name", "options", "named", "message"),
    [
        ("info_nce", {}, {"ids": torch.zeros(3)}, r"ids has shape \(3,\).*\(12,\)"),
        ("info_nce", {}, {"ids": torch.zeros(12)}, "ids has dtype torch.float32.*ids.long"),
        ("supcon", {}, {"labels": torch.zeros(12, 10).long()}, r"labels has shape \(12, 10\)"),
        ("debiased", {"class_prior": 1.0}, {}, r"class_prior=1.0 must lie in \[0, 1\)"),
        ("hard", {"beta": -1}, {}, "beta=-1 must be at least 0"),
        ("ressl", {"teacher_temperature": 0}, {}, "teacher_temperature=0 must be greater than 0"),
        ("mochi", {"mixed": -1}, {}, "mixed=-1 must be at least 0"),
    ],
)
def test_bad_input(name: str, options: dict[str, object], named: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plugins.build_loss(name, options)(unit(N), unit(N), unit(K), T, **named)


@pytest.mark.parametrize("name", ["decoupled", "ressl"])
def test_losses_that_need_negatives_say_so(name: str) -> None:
    with pytest.raises(ValueError, match="negatives has no row"):
        plugins.build_loss(name, {})(unit(N), unit(N), unit(K)[:0], T)
