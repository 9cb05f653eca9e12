"""CrossMoCo: two kinds of input contrasted both ways, with the step semantics of MoCo."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Ranks
from torch import Tensor, nn

from moco_plugins.core.cross import CrossMoCo


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 12), nn.Linear(12, 10)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["mask"][:, :, None]
        return self.out(torch.tanh((self.table(batch["ids"]) * mask).sum(1) / mask.sum(1)))


def build(**options: Any) -> CrossMoCo:
    torch.manual_seed(0)
    image = nn.Sequential(nn.Flatten(), nn.Linear(12, 14), nn.Tanh())
    settings = {"queue_size": 20, "projection_dim": 8, "momentum": 0.9, "temperature": 0.1, **options}
    return CrossMoCo(image, Words(), 14, 10, **settings).double()


def batch(step: int, n: int = 8) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(n, 3, 2, 2, generator=generator, dtype=torch.float64)
    words = torch.randint(0, 20, (n, 5), generator=generator)
    return images, {"ids": words, "mask": torch.ones(n, 5, dtype=torch.float64)}


def part_of(pair: tuple[Tensor, dict[str, Tensor]], part: slice) -> tuple[Tensor, dict[str, Tensor]]:
    return pair[0][part], {name: tensor[part] for name, tensor in pair[1].items()}


def train(cross: CrossMoCo, steps: range, parts: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(cross.parameters(), 0.1)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for i in range(parts):
            size = 8 // parts
            loss = cross(part_of(batch(step), slice(i * size, (i + 1) * size)))
            (loss / parts).backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses


@pytest.mark.parametrize("in_batch", [False, True])
def test_steps_equal_the_formula_written_out(in_batch: bool) -> None:
    cross = build(in_batch_negatives=in_batch)
    plain = copy.deepcopy(cross)
    queues = [queue.keys.clone() for queue in plain.queue]
    ours = torch.optim.SGD(cross.parameters(), 0.1)
    theirs = torch.optim.SGD(plain.query_encoder.parameters(), 0.1)
    pointer = 0
    for step in range(6):
        images, texts = batch(step)
        q = [F.normalize(plain.query_encoder[n](x), dim=1) for n, x in (("image", images), ("text", texts))]
        with torch.no_grad():
            k = [F.normalize(plain.key_encoder[n](x), dim=1) for n, x in (("image", images), ("text", texts))]
        expected = torch.zeros((), dtype=torch.float64)
        for mine, other in ((0, 1), (1, 0)):
            logits = q[mine] @ torch.cat([k[other], queues[other]]).T / 0.1
            if not in_batch:
                own = torch.eye(8, dtype=torch.bool)
                logits[:, :8] = logits[:, :8].masked_fill(~own, -torch.inf)
            expected = expected + F.cross_entropy(logits, torch.arange(8)) / 2
        loss = cross((images, texts))
        assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-10)
        for optimizer, value in ((ours, loss), (theirs, expected)):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        with torch.no_grad():
            for key, query in zip(plain.key_encoder.parameters(), plain.query_encoder.parameters(), strict=True):
                key.lerp_(query, 0.1)
            for row in range(8):
                for queue, keys in zip(queues, k, strict=True):
                    queue[pointer] = keys[row]
                pointer = (pointer + 1) % 20
        for queue, kept in zip(cross.queue, queues, strict=True):
            assert torch.allclose(queue.keys, kept, atol=1e-10)
    for mine, theirs_ in zip(cross.key_encoder.parameters(), plain.key_encoder.parameters(), strict=True):
        assert torch.allclose(mine, theirs_, atol=1e-10)


def test_accumulated_parts_equal_one_batch() -> None:
    whole, parts = build(in_batch_negatives=False), build(in_batch_negatives=False)
    train(whole, range(5))
    train(parts, range(5), parts=4)
    for name, value in whole.state_dict().items():
        assert torch.allclose(value.double(), parts.state_dict()[name].double(), atol=1e-10), name


def test_resume_is_bit_identical() -> None:
    straight, first = build(learnable_temperature=True), build(learnable_temperature=True)
    losses = train(straight, range(8))
    train(first, range(4))
    resumed = build(learnable_temperature=True)
    resumed.load_state_dict(copy.deepcopy(first.state_dict()))
    assert train(resumed, range(4, 8)) == losses[4:]
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in straight.state_dict().items())


def test_evaluation_changes_nothing() -> None:
    cross = build()
    train(cross, range(2))
    before = copy.deepcopy(cross.state_dict())
    cross.eval()(batch(9)).backward()
    torch.optim.SGD(cross.parameters(), 0.0).step()
    assert all(torch.equal(value, before[name]) for name, value in cross.state_dict().items())
    assert cross.embed(batch(0)[0]).shape == (8, 14)
    assert [part.shape for part in cross.project(*batch(0))] == [(8, 8), (8, 8)]
    assert 0 <= cross.metrics()["contrastive_top1"] <= 1


def test_pairs_of_one_id_are_no_negatives_of_each_other() -> None:
    cross = build(queue_options={"columns": {"id": "long"}})
    ids = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    images, texts = batch(0)
    loss = cross((images, texts), ids=ids)
    q = [part.detach() for part in cross.project(images, texts)]
    expected = 0.0
    for mine, other in ((0, 1), (1, 0)):  # at the first step keys are what queries are, before normalisation alike
        keys = torch.cat([q[other], cross.queue[other].keys])
        logits = q[mine] @ keys.T / 0.1
        same = ids[:, None] == ids
        same.fill_diagonal_(False)
        logits[:, :8] = logits[:, :8].masked_fill(same, -torch.inf)
        expected += float(F.cross_entropy(logits, torch.arange(8))) / 2
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-10)
    loss.backward()
    torch.optim.SGD(cross.parameters(), 0.1).step()
    assert all(queue.columns["id"][:8].tolist() == ids.tolist() for queue in cross.queue)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def train_in_ddp() -> dict[str, Tensor]:
    cross = build()
    wrapped = nn.parallel.DistributedDataParallel(cross)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    rank = dist.get_rank()
    for step in range(4):
        optimizer.zero_grad()
        wrapped(part_of(batch(step), slice(4 * rank, 4 * rank + 4))).backward()
        optimizer.step()
    return copy.deepcopy(cross.state_dict())


def test_two_ranks_equal_one_process_on_the_joined_batch(two: Ranks) -> None:
    alone = build()
    train(alone, range(4))
    states = two.run(train_in_ddp)
    for state in states:
        for name, value in alone.state_dict().items():
            assert torch.allclose(value.double(), state[name].double(), atol=1e-9), name


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"temperature": 0.0}, ValueError, "temperature=0.0 must be greater than 0"),
        ({"queue_size": 0}, ValueError, "queue_size=0 must be a whole number"),
        ({"momentum": 0.005}, ValueError, "momentum=0.005"),
        ({"text_encoder": "bert"}, TypeError, "text_encoder='bert' is a str"),
    ],
)
def test_bad_arguments(change: dict[str, object], error: type[Exception], message: str) -> None:
    good: dict[str, Any] = {
        "image_encoder": nn.Linear(3, 4),
        "text_encoder": nn.Linear(3, 4),
        "image_dim": 4,
        "text_dim": 4,
    }
    with pytest.raises(error, match=message):
        CrossMoCo(**{**good, **change})
    with pytest.raises(ValueError, match="share parameters"):
        CrossMoCo(good["image_encoder"], good["image_encoder"], 4, 4)
