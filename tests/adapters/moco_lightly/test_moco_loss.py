"""MoCoLoss: lightly's NTXentLoss where that is right, and right where it is not."""

from __future__ import annotations

import copy
import io
import math
import pickle
import random
import warnings
from collections import deque

import pytest
import torch
import torch.nn.functional as F
from lightly.loss import NTXentLoss
from moco_lightly import MoCoLoss
from torch import nn

from moco_plugins.steps import distributed


def twins(size: int, dim: int, temperature: float = 0.1) -> tuple[nn.Module, MoCoLoss]:
    """lightly's loss and ours with the same bank."""
    theirs = NTXentLoss(temperature, memory_bank_size=(size, dim))
    ours = MoCoLoss(temperature, memory_bank_size=(size, dim))
    ours.queue.keys.copy_(theirs.memory_bank.bank)
    return theirs, ours


def step(criterion, encoder, optimizer, *pairs) -> float:
    """A training step of one or more calls of the loss."""
    optimizer.zero_grad()
    loss = sum(criterion(encoder(x), k) for x, k in pairs)
    loss.backward()
    optimizer.step()
    return loss.item()


def encoder_and_optimizer(dim: int = 8):
    encoder = nn.Linear(dim, dim)
    return encoder, torch.optim.SGD(encoder.parameters(), 0.1)


def unit(n: int, dim: int = 8) -> torch.Tensor:
    return F.normalize(torch.randn(n, dim), dim=1)


def test_equals_lightly_step_by_step():
    theirs, ours = (criterion.double() for criterion in twins(64, 16))
    encoders = [nn.Linear(16, 16, dtype=torch.double) for _ in range(2)]
    encoders[1].load_state_dict(encoders[0].state_dict())
    optimizers = [torch.optim.SGD(e.parameters(), 0.1) for e in encoders]
    for _ in range(20):
        x, k = torch.randn(2, 16, 16, dtype=torch.double)
        losses = [step(c, e, o, (x, k)) for c, e, o in zip((theirs, ours), encoders, optimizers, strict=True)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-9)
        torch.testing.assert_close(encoders[0].weight.grad, encoders[1].weight.grad, atol=1e-9, rtol=0)
        torch.testing.assert_close(theirs.memory_bank.bank, ours.queue.keys, atol=1e-9, rtol=0)


def test_holds_the_newest_keys_whatever_the_batch_sizes():
    draw = random.Random(0)
    for _ in range(20):
        size = draw.randint(1, 20)
        ours = MoCoLoss(memory_bank_size=(size, 8), fill="empty")
        encoder, optimizer = encoder_and_optimizer()
        newest = deque(maxlen=size)
        for _ in range(8):
            keys = unit(draw.randint(1, 3 * size))
            step(ours, encoder, optimizer, (torch.randn(len(keys), 8), keys))
            newest.extend(keys)
        torch.testing.assert_close(ours.queue.ordered(), torch.stack(list(newest)))


def test_lightly_loses_keys_where_ours_does_not():
    """The reason to be: if lightly mends this, the documentation has to change."""
    theirs, ours = twins(10, 8)
    encoder, optimizer = encoder_and_optimizer()
    keys = [unit(4) for _ in range(5)]
    for k in keys:
        for criterion in (theirs, ours):
            step(criterion, encoder, optimizer, (torch.randn(4, 8), k))
    newest = torch.cat(keys)[-10:]

    def present(bank):
        return sum(bool(((bank - row).abs().sum(1) < 1e-4).any()) for row in newest)

    assert present(theirs.memory_bank.bank) < 10
    assert present(ours.queue.keys) == 10


def test_accumulation_equals_the_joined_batch():
    whole, parts = MoCoLoss(0.2, (50, 8)), MoCoLoss(0.2, (50, 8))
    parts.load_state_dict(whole.state_dict())
    (e1, o1), (e2, o2) = encoder_and_optimizer(), encoder_and_optimizer()
    e2.load_state_dict(e1.state_dict())
    for _ in range(4):
        x, k = torch.randn(32, 8), unit(32)
        step(whole, e1, o1, (x, k))
        o2.zero_grad()
        before = parts.queue.keys.clone()
        for i in range(0, 32, 8):
            (parts(e2(x[i : i + 8]), k[i : i + 8]) / 4).backward()
        assert torch.equal(parts.queue.keys, before)
        o2.step()
        torch.testing.assert_close(e1.weight, e2.weight, atol=1e-6, rtol=0)
        torch.testing.assert_close(whole.queue.keys, parts.queue.keys)
        assert int(whole.queue.ptr) == int(parts.queue.ptr)


def test_two_calls_in_a_step_see_the_same_queue_and_enqueue_once_each():
    ours = MoCoLoss(0.2, (64, 8))
    encoder, optimizer = encoder_and_optimizer()
    before = ours.queue.keys.clone()
    a, b = unit(6), unit(6)
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    loss = ours(encoder(x), a) + ours(encoder(y), b)
    assert torch.equal(ours.queue.keys, before)
    alone = MoCoLoss(0.2, (64, 8))
    alone.queue.keys.copy_(before)
    torch.testing.assert_close(loss, alone(encoder(x), a) + alone.eval()(encoder(y), b))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    assert int(ours.queue.filled) == 12
    torch.testing.assert_close(ours.queue.ordered(), torch.cat([a, b]))


@pytest.mark.parametrize("how", ["eval", "no_grad", "no gradient in the query", "no step"])
def test_nothing_is_enqueued(how):
    ours = MoCoLoss(0.2, (16, 8))
    encoder, optimizer = encoder_and_optimizer()
    state = copy.deepcopy(ours.state_dict())
    if how == "eval":
        ours.eval()
    with torch.set_grad_enabled(how != "no_grad"):
        query = encoder(torch.randn(4, 8))
        loss = ours(query.detach() if how.startswith("no gradient") else query, unit(4))
    if how == "eval":
        loss.backward()
    if how != "no step":
        encoder(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(state.values(), ours.state_dict().values(), strict=True))


def test_an_unrelated_optimizer_does_not_commit():
    ours = MoCoLoss(0.2, (16, 8))
    encoder, optimizer = encoder_and_optimizer()
    probe = nn.Linear(8, 2)
    other = torch.optim.SGD(probe.parameters(), 0.1)
    features = encoder(torch.randn(4, 8))
    probe(features.detach()).sum().backward()
    loss = ours(features, unit(4))
    other.step()
    assert int(ours.queue.filled) == 0
    loss.backward()
    optimizer.step()
    assert int(ours.queue.filled) == 4
    optimizer.step()  # a step without a forward pass brings no keys
    assert int(ours.queue.filled) == 4


def test_either_of_two_optimizers_of_the_encoder_commits_once():
    ours = MoCoLoss(0.2, (16, 8))
    backbone, head = nn.Linear(8, 8), nn.Linear(8, 8)
    frozen_head = nn.Linear(8, 8)  # in no optimiser at all
    first, second = (torch.optim.SGD(m.parameters(), 0.1) for m in (backbone, head))
    for _ in range(2):
        ours(frozen_head(head(backbone(torch.randn(4, 8)).relu())), unit(4)).backward()
        first.step()
        second.step()
    assert int(ours.queue.filled) == 8


def test_a_step_that_the_grad_scaler_skips_commits_nothing():
    ours = MoCoLoss(0.2, (16, 8))
    encoder, optimizer = encoder_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def one(x):
        optimizer.zero_grad()
        scaler.scale(ours(encoder(x), unit(4))).backward()
        if not torch.isfinite(x).all():
            encoder.weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()

    one(torch.randn(4, 8))
    assert int(ours.queue.filled) == 4
    bad = torch.randn(4, 8)
    bad[0, 0] = math.inf
    one(bad)
    assert int(ours.queue.filled) == 4


def test_a_foreign_optimizer_is_reported():
    ours = MoCoLoss(0.2, (16, 8))
    encoder, _ = encoder_and_optimizer()
    wrong = torch.optim.SGD(nn.Linear(8, 8).parameters(), 0.1)
    for _ in range(2):
        ours(encoder(torch.randn(4, 8)), unit(4)).backward()
        wrong.step()
    ours(encoder(torch.randn(4, 8)), unit(4)).backward()
    with pytest.warns(UserWarning, match="owns no parameter that the queries"):
        wrong.step()
    for _ in range(100):
        ours(encoder(torch.randn(4, 8)), unit(4))
    assert len(ours.boundary._staged) <= 5  # what nobody commits does not pile up
    ours.step()
    assert int(ours.queue.filled) == 16


def test_resume_is_bit_identical():
    torch.manual_seed(3)
    batches = [(torch.randn(6, 8), unit(6)) for _ in range(20)]

    def run(criterion, encoder, optimizer, part):
        return [step(criterion, encoder, optimizer, batch) for batch in part]

    criterion, (encoder, optimizer) = MoCoLoss(0.2, (40, 8)), encoder_and_optimizer()
    start = copy.deepcopy((criterion.state_dict(), encoder.state_dict()))
    whole = run(criterion, encoder, optimizer, batches)

    first, (e1, o1) = MoCoLoss(0.2, (40, 8)), encoder_and_optimizer()
    first.load_state_dict(start[0])
    e1.load_state_dict(start[1])
    losses = run(first, e1, o1, batches[:10])
    file = io.BytesIO()
    torch.save({"c": first.state_dict(), "e": e1.state_dict(), "o": o1.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second, (e2, o2) = MoCoLoss(0.2, (40, 8)), encoder_and_optimizer()
    second.load_state_dict(saved["c"])
    e2.load_state_dict(saved["e"])
    o2.load_state_dict(saved["o"])
    losses += run(second, e2, o2, batches[10:])
    assert losses == whole
    assert all(
        torch.equal(a, b) for a, b in zip(criterion.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_a_queue_of_another_size():
    saved = MoCoLoss(0.2, (16, 8)).state_dict()
    with pytest.raises(RuntimeError, match="16 keys and this one has 4"):
        MoCoLoss(0.2, (4, 8)).load_state_dict(saved)
    MoCoLoss(0.2, (4, 8), resize="keep_newest").load_state_dict(saved)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_follow_their_own_encoder(way):
    pair = nn.ModuleDict({"encoder": nn.Linear(8, 8), "criterion": MoCoLoss(0.2, (16, 8))})
    pair["criterion"](pair["encoder"](torch.randn(4, 8)), unit(4)).backward()
    other = way(pair)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    step(other["criterion"], other["encoder"], optimizer, (torch.randn(3, 8), unit(3)))
    assert int(other["criterion"].queue.filled) == 3
    assert int(pair["criterion"].queue.filled) == 0


def test_half_precision_and_zero_rows():
    ours = MoCoLoss(0.07, (16, 8))
    encoder, _ = encoder_and_optimizer()
    with torch.autocast("cpu", torch.bfloat16):
        query = encoder(torch.randn(4, 8))
        assert query.dtype == torch.bfloat16
        loss = ours(query, unit(4).bfloat16())
    assert loss.dtype == ours.queue.keys.dtype == torch.float32
    zero = torch.zeros(4, 8, requires_grad=True)
    loss = ours(zero, torch.zeros(4, 8))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(zero.grad).all()


def test_keys_get_no_gradient():
    ours = MoCoLoss(0.2, (16, 8))
    query, key = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    ours(query, key).backward()
    assert key.grad is None
    assert query.grad is not None


def test_starts_near_ln_of_the_negatives():
    ours = MoCoLoss(1.0, (1000, 8))
    assert ours(unit(64).requires_grad_(), unit(64)).item() == pytest.approx(math.log(1001), abs=0.2)


def test_compiled_training_equals_eager():
    torch._dynamo.reset()
    eager, fast = MoCoLoss(0.2, (16, 8)), MoCoLoss(0.2, (16, 8))
    fast.load_state_dict(eager.state_dict())
    compiled = torch.compile(fast, backend="aot_eager")
    (e1, o1), (e2, o2) = encoder_and_optimizer(), encoder_and_optimizer()
    e2.load_state_dict(e1.state_dict())
    for _ in range(3):
        x, k = torch.randn(4, 8), unit(4)
        assert step(eager, e1, o1, (x, k)) == pytest.approx(step(compiled, e2, o2, (x, k)), abs=1e-5)
    torch.testing.assert_close(eager.queue.keys, fast.queue.keys)
    assert int(fast.queue.filled) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_bank_size": 0}, r"NTXentLoss\(\)"),
        ({"memory_bank_size": 4096}, r"memory_bank_size=\(4096, dim\)"),
        ({"memory_bank_size": (0, 128)}, "at least 1"),
        ({"memory_bank_size": (64, 128, 2)}, "number of keys, their dimension"),
        ({"temperature": 0.0}, "temperature=0.0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        MoCoLoss(**arguments)


def test_bad_shapes_name_the_cure():
    ours = MoCoLoss(0.2, (16, 8))
    with pytest.raises(ValueError, match=r"memory_bank_size=\(16, 4\)"):
        ours(torch.randn(2, 4), torch.randn(2, 4))
    with pytest.raises(ValueError, match="query has 2 rows and key 3"):
        ours(torch.randn(2, 8), torch.randn(3, 8))
    with pytest.raises(ValueError, match="flatten"):
        ours(torch.randn(2, 8, 1, 1), torch.randn(2, 8))


def train_in_ddp(gather: bool, batches) -> tuple[dict, dict]:
    """Two ranks with default DDP flags; rank r takes its half of each batch."""
    torch.manual_seed(distributed.rank())  # each rank's own initial queue and weights: they have to be brought together
    model = nn.parallel.DistributedDataParallel(Model(gather))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    initial = {}
    for x, k in batches:
        mine = slice(distributed.rank(), None, 2)
        loss = model(x[mine], k[mine])
        initial = initial or copy.deepcopy(model.module.state_dict())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return initial, model.module.state_dict()


class Model(nn.Module):
    def __init__(self, gather: bool) -> None:
        super().__init__()
        self.encoder, self.criterion = nn.Linear(8, 8), MoCoLoss(0.2, (20, 8), gather_distributed=gather)

    def forward(self, x, k):
        return self.criterion(self.encoder(x), k)


def test_two_ranks_equal_one_process_on_the_joined_batch(two_ranks):
    batches = [(torch.randn(6, 8), unit(6)) for _ in range(6)]
    (initial, state), (_, other) = two_ranks.run(train_in_ddp, True, batches)
    assert all(torch.equal(state[name], other[name]) for name in state)
    model = Model(True)
    model.load_state_dict(initial)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, k in batches:
        order = [0, 2, 4, 1, 3, 5]  # rank 0's rows, then rank 1's
        step(model.criterion, model.encoder, optimizer, (x[order], k[order]))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, atol=1e-6, rtol=1e-5, msg=name)


def test_two_ranks_with_queues_of_their_own(two_ranks):
    batches = [(torch.randn(6, 8), unit(6)) for _ in range(3)]
    results = two_ranks.run(train_in_ddp, False, batches)
    for rank, (_, state) in enumerate(results):
        assert int(state["criterion.queue.filled"]) == 9
        own = torch.cat([k[rank::2] for _, k in batches])
        torch.testing.assert_close(state["criterion.queue.keys"][:9], own)


def test_no_warning_in_plain_use():
    ours = MoCoLoss(0.2, (16, 8))
    encoder, optimizer = encoder_and_optimizer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            step(ours, encoder, optimizer, (torch.randn(4, 8), unit(4)))


def test_the_keys_of_a_skipped_step_are_thrown_away():
    """Their gradient was, so they would enter beside keys of a step they took no part in."""
    ours = MoCoLoss(0.2, (16, 8), fill="empty")
    encoder, optimizer = encoder_and_optimizer()
    ours(encoder(torch.randn(4, 8)), unit(4)).backward()
    optimizer.zero_grad()  # what a training loop does after GradScaler has skipped the step
    keys = unit(3)
    step(ours, encoder, optimizer, (torch.randn(3, 8), keys))
    torch.testing.assert_close(ours.queue.ordered(), keys)
