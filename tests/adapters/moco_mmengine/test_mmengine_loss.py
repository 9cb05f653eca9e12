"""``moco_plugins.MoCoLoss`` in models of one's own."""

import copy

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("mmengine")

from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS

torch.set_num_threads(1)
LOSS = {"type": "moco_plugins.MoCoLoss", "dim": 8, "queue_size": 20, "temperature": 0.1}


class OwnModel(BaseModel):
    """Somebody's encoders, our loss."""

    def __init__(self, loss):
        super().__init__()
        self.query, self.key = torch.nn.Linear(6, 8), torch.nn.Linear(6, 8)
        self.key.requires_grad_(False)
        self.loss = MODELS.build(loss)

    def forward(self, inputs, data_samples=None, mode="loss"):
        return {"loss": self.loss(self.query(inputs[0]), self.key(inputs[1]))}


def batches(count, n=6):
    torch.manual_seed(1)
    return [{"inputs": [torch.randn(n, 6), torch.randn(n, 6)]} for _ in range(count)]


def test_it_is_the_formula_and_the_queue_follows_the_steps():
    torch.manual_seed(0)
    model = OwnModel(LOSS)
    wrapper = OptimWrapper(torch.optim.SGD(model.query.parameters(), 0.1))
    bank = [row.clone() for row in model.loss.queue.keys]
    for step, batch in enumerate(batches(7)):
        q, k = (F.normalize(f(x), dim=1) for f, x in zip((model.query, model.key), batch["inputs"], strict=True))
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ torch.stack(bank).T], 1) / 0.1
        want = F.cross_entropy(logits, torch.zeros(6, dtype=torch.long))
        assert float(model.train_step(batch, wrapper)["loss"].detach()) == pytest.approx(float(want), rel=1e-5)
        for i, row in enumerate(k):
            bank[(6 * step + i) % 20] = row.detach()
        assert torch.allclose(model.loss.queue.keys, torch.stack(bank), atol=1e-6)


def test_under_accumulation_the_queue_waits_for_the_step():
    model = OwnModel(LOSS)
    wrapper = OptimWrapper(torch.optim.SGD(model.query.parameters(), 0.1), accumulative_counts=3)
    wrapper.initialize_count_status(model, 0, 6)
    filled = []
    for batch in batches(6, n=2):
        model.train_step(batch, wrapper)
        filled.append(int(model.loss.queue.filled))
    assert filled == [0, 0, 6, 6, 6, 12]


def test_eval_and_copies_change_nothing():
    model = OwnModel(LOSS)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.query.parameters(), 0.0)
    twin = copy.deepcopy(model)
    model.eval()
    loss = model(**batches(1)[0])["loss"]
    loss.backward()
    optimizer.step()
    twin.train_step(batches(1)[0], OptimWrapper(torch.optim.SGD(twin.query.parameters(), 0.0)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert int(twin.loss.queue.filled) == 6
    model.load_state_dict(twin.state_dict())
    assert torch.equal(model.loss.queue.keys, twin.loss.queue.keys)


def test_options():
    loss = MODELS.build({**LOSS, "loss_weight": 2.0, "fill": "empty", "in_batch_negatives": True})
    plain = MODELS.build({**LOSS, "fill": "empty", "in_batch_negatives": True})
    q, k = torch.randn(4, 8), torch.randn(4, 8)
    assert float(loss(q, k)) == pytest.approx(2 * float(plain(q, k)))
    with pytest.raises(ValueError, match="temperature=0"):
        MODELS.build({**LOSS, "temperature": 0})
