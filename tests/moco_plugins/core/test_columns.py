"""The queue remembers labels and ids beside its keys; false negatives leave, labels make positives; any kind of view."""

from __future__ import annotations

import collections
import copy
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import small_backbone, small_views
from torch import Tensor, nn

from moco_plugins import KeyQueue, MoCo

COLUMNS = {"label": torch.long, "id": "long"}


def unit(n: int, dim: int = 8) -> Tensor:
    return F.normalize(torch.randn(n, dim), dim=1)


def build(**options: object) -> MoCo:
    settings = {"queue_size": 24, "projection_dim": 8, "momentum": 0.9, "hidden_dim": 16, **options}
    return MoCo(small_backbone(), 16, **settings)


def ids_of(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_columns_stay_beside_their_keys_in_any_sequence_of_batches(size: int, batches: list[int]) -> None:
    queue = KeyQueue(size, 8, columns={"id": torch.long, "time": torch.float32})
    newest: collections.deque[tuple[int, float]] = collections.deque(maxlen=size)
    number = 0
    for n in batches:
        keys, ids = unit(n), torch.arange(number, number + n)
        keys[::4] = torch.nan  # these do not enter, nor does what is known of them
        queue.enqueue(keys, {"id": ids, "time": ids / 2})
        newest.extend((int(i), float(i) / 2) for row, i in enumerate(ids) if row % 4)
        number += n
    order = (torch.arange(size) + int(queue.ptr)) % size
    known = [(int(i), float(t)) for i, t in zip(queue.columns["id"][order], queue.columns["time"][order], strict=True)]
    assert [pair for pair in known if pair[0] >= 0] == list(newest)
    assert queue.columns["time"].isnan().sum() == size - len(newest)


def test_rows_nobody_told_anything_of_are_unknown() -> None:
    queue = KeyQueue(6, 8, columns={"id": torch.long, "seen": torch.bool})
    queue.enqueue(unit(2), {"id": ids_of(4, 5)})
    queue.enqueue(unit(2))
    assert queue.columns["id"].tolist() == [4, 5, -1, -1, -1, -1]
    assert not queue.columns["seen"].any()


@pytest.mark.parametrize("size", [4, 10])
def test_columns_are_saved_loaded_and_follow_a_resize(size: int) -> None:
    queue = KeyQueue(6, 8, columns=COLUMNS)
    queue.enqueue(unit(8), {"id": torch.arange(8), "label": torch.arange(8) % 2})
    other = KeyQueue(size, 8, resize="keep_newest", columns=COLUMNS)
    other.load_state_dict(queue.state_dict())
    kept = min(size, 6)
    assert other.columns["id"][:kept].tolist() == list(range(8 - kept, 8))
    assert torch.equal(other.keys[:kept], queue.ordered()[-kept:])
    same = KeyQueue(6, 8, columns=COLUMNS)
    same.load_state_dict(copy.deepcopy(queue.state_dict()))
    assert torch.equal(same.columns["label"], queue.columns["label"])
    assert "columns.id" in queue.state_dict()
    assert queue.double().columns["id"].dtype == torch.long


def test_a_checkpoint_without_the_column_is_reported() -> None:
    with pytest.raises(RuntimeError, match=r"Missing key.*columns.id"):
        KeyQueue(6, 8, columns={"id": torch.long}).load_state_dict(KeyQueue(6, 8).state_dict())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"idd": ids_of(1, 2)}, "'idd'.*does not remember.*columns="),
        ({"id": ids_of(1)}, r"'id' has shape \(1,\).*\(2,\)"),
    ],
)
def test_bad_columns(columns: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeyQueue(6, 8, columns={"id": torch.long}).enqueue(unit(2), columns)
    with pytest.raises(ValueError, match="dtype 'lng'"):
        KeyQueue(6, 8, columns={"id": "lng"})


@pytest.mark.parametrize("symmetric", [False, True])
def test_accumulated_passes_fill_keys_and_columns_as_one_batch_does(symmetric: bool) -> None:
    whole = build(queue_options={"columns": COLUMNS}, symmetric=symmetric).double()
    parts = copy.deepcopy(whole)
    views, ids = small_views(8), torch.arange(8)
    labels = ids % 3
    optimizers = [torch.optim.SGD(moco.parameters(), 0.1) for moco in (whole, parts)]
    whole(views, labels=labels, ids=ids).backward()
    for i in range(4):
        part = slice(2 * i, 2 * i + 2)
        (parts([v[part] for v in views], labels=labels[part], ids=ids[part]) / 4).backward()
    for optimizer in optimizers:
        optimizer.step()
    for name, value in whole.queue.state_dict().items():
        assert torch.allclose(value, parts.queue.state_dict()[name], atol=1e-12), name
    assert whole.queue.columns["id"][:8].tolist() == list(range(8))


def test_false_negatives_leave_the_denominator_by_themselves() -> None:
    moco = build(queue_options={"columns": {"id": torch.long}}, shuffle_bn=False).double()
    blind = build(shuffle_bn=False).double()
    views = small_views(6)
    blind.load_state_dict({n: v for n, v in moco.state_dict().items() if not n.startswith("queue.columns")})
    known, unknown = torch.arange(6), torch.full((6,), -1)
    for ids in (known, known, unknown):  # the same images once more: then their own keys are in the queue
        optimizer = torch.optim.SGD(moco.parameters(), 0.0)
        queue, of_keys = moco.queue.negatives().clone(), moco.queue.columns["id"].clone()
        loss = moco(views, ids=ids)
        q = F.normalize(moco.query_encoder(views[0]), dim=1)
        k = F.normalize(moco.key_encoder(views[1]), dim=1)
        logits = (q @ queue.T).masked_fill((ids[:, None] == of_keys) & (ids >= 0)[:, None], -torch.inf)
        logits = torch.cat([(q * k).sum(1, keepdim=True), logits], 1) / 0.2
        assert float(loss.detach()) == pytest.approx(float(F.cross_entropy(logits, torch.zeros(6).long())), abs=1e-9)
        loss.backward()
        optimizer.step()
    assert moco.queue.columns["id"][:12].tolist() == [*range(6), *range(6)]


def test_supcon_brings_its_column_learns_and_says_what_it_asks_for() -> None:
    torch.manual_seed(0)
    moco = build(loss="supcon", temperature=0.2)
    assert moco.asks_for == ("labels",)
    assert build().asks_for == ()
    assert build(loss="supcon", queue_options={"columns": {"id": "long"}}).asks_for == ("labels", "ids")
    optimizer = torch.optim.Adam(moco.parameters(), 1e-2)
    centres = torch.randn(3, 3, 2, 2)
    for _ in range(60):
        labels = torch.randint(0, 3, (16,))
        images = centres[labels]
        loss = moco([images + 0.3 * torch.randn_like(images) for _ in range(2)], labels=labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    q = F.normalize(moco.query_encoder(centres), dim=1)
    assert float((q @ q.T - torch.eye(3)).amax()) < 0.3  # classes stand apart
    of_keys = moco.queue.columns["label"]
    assert (
        float((F.one_hot(of_keys, 3).float().T @ moco.queue.keys @ q.T).argmax(1).eq(torch.arange(3)).float().mean())
        == 1
    )


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        ({"loss": "supcon"}, {}, r"labels=None.*column 'label'.*moco\(views, labels="),
        ({"queue_options": {"columns": {"id": "long"}}}, {}, r"ids=None.*moco\(views, ids="),
        ({"loss": "supcon"}, {"labels": torch.zeros(3).long()}, r"labels has shape \(3,\).*\(4,\)"),
        ({"loss": "supcon"}, {"labels": torch.zeros(4)}, "labels has dtype torch.float32.*long"),
        ({"loss": "supcon"}, {"labels": [1, 2, 3, 4]}, "labels has shape list"),
    ],
)
def test_labels_and_ids_that_are_missing_or_misshapen(
    options: dict[str, object], given: dict[str, Tensor], message: str
) -> None:
    moco = build(**options)
    with pytest.raises(ValueError, match=message):
        moco(small_views(4, torch.float32), **given)
    assert torch.isfinite(moco.eval()(small_views(4, torch.float32)))  # validation may have neither


# Any kind of view


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(20, 16), nn.BatchNorm1d(16)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        mask = batch["attention_mask"][:, :, None]
        return self.norm((self.table(batch["input_ids"]) * mask).sum(1) / mask.sum(1))


def words(n: int) -> OrderedDict[str, Tensor]:
    return OrderedDict(input_ids=torch.randint(0, 20, (n, 5)), attention_mask=torch.ones(n, 5))


@pytest.mark.parametrize("symmetric", [False, True])
def test_views_may_be_nested_structures(symmetric: bool) -> None:
    moco = MoCo(Words(), 16, queue_size=32, projection_dim=8, symmetric=symmetric, drift_probe=4)
    optimizer = torch.optim.SGD(moco.parameters(), 0.1)
    for _ in range(3):
        moco([words(8), words(8)]).backward()  # BatchNorm is split: the rows are permuted together
        optimizer.step()
    assert int(moco.queue.filled) == (32 if symmetric else 24)
    assert moco.embed(words(3)).shape == (3, 16)
    assert moco.metrics()["key_drift"] >= 0


@pytest.mark.parametrize("shape", [(7,), (50, 3), (1, 400), (3, 2, 4, 4)])
def test_views_may_be_tables_point_clouds_waveforms_and_clips(shape: tuple[int, ...]) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), 16))
    moco = MoCo(net, 16, queue_size=32, projection_dim=8)
    moco([torch.randn(4, *shape), torch.randn(4, *shape)]).backward()


@pytest.mark.parametrize(
    ("views", "error", "message"),
    [
        ([words(4), words(5)], ValueError, r"\['input_ids'\]: \(4, 5\).*\(5, 5\).*same N"),
        (
            [{"a": torch.ones(4, 2), "b": torch.ones(3, 2)}, {"a": torch.ones(4, 2)}],
            ValueError,
            r"\['b'\]: \(3, 2\).*same N",
        ),
        ([{"a": torch.ones(4, 2), "b": "text"}, {"a": torch.ones(4, 2)}], TypeError, r"str at \['b'\].*nested"),
        ([{}, {}], ValueError, "same N >= 1"),
        ([(same := words(4)), dict(same)], ValueError, "twice the same"),
    ],
)
def test_bad_nested_views(views: list[object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MoCo(Words(), 16, queue_size=32, projection_dim=8)(views)
