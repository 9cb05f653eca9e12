"""The harness's engine: the same steps as Lightning's, in place, quietly, and the same again after an interruption."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("mmengine")

from moco_plugins import MoCo
from moco_plugins.backbones import ConvNet
from moco_plugins.core.views import AffineViews
from moco_plugins.data.datasets import digits
from moco_plugins.data.loader import make_loader
from moco_plugins.hooks import manager as plugins
from moco_plugins.hooks.engine import TrainingJob

torch.set_num_threads(1)
EPOCHS = 3


class Interrupted(Exception):
    pass


def method(variant="v2", **options):
    torch.manual_seed(3)
    if variant == "v3":
        options = {"queue_size": 0, "hidden_dim": 32, "projection_dim": 16, **options}
    else:
        options = {"queue_size": 100, "projection_dim": 16, "temperature": 0.2, **options}
    return MoCo(ConvNet(1, width=4), 64, variant, momentum=options.pop("momentum", 0.99), **options)


def job(folder, model, steps, **changes):
    images = digits(None)[0].subset(range(160))
    arguments = {
        "method": model,
        "loader": make_loader(images, AffineViews(), lambda x: x, batch_size=32, seed=5),
        "epochs": EPOCHS,
        "make_optimizer": lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], 2e-3),
        "make_scheduler": lambda o, total: torch.optim.lr_scheduler.OneCycleLR(o, 2e-3, total_steps=total),
        "folder": folder,
        "device": "cpu",
        "seed": 11,
        "on_step": lambda step, loss: steps.append((step, loss)),
    }
    return TrainingJob(**{**arguments, **changes})


def train(engine, folder, model, **changes):
    steps = []
    outcome = plugins.adapter(engine).engine(job(folder, model, steps, **changes))
    return steps, outcome


@pytest.mark.parametrize("variant", ["v2", "v3"])
def test_the_steps_are_those_of_lightning(tmp_path, variant):
    pytest.importorskip("pytorch_lightning")
    ours, theirs = method(variant, momentum=None), method(variant, momentum=None)
    a, outcome = train("mmengine", tmp_path / "mm", ours)
    b, _ = train("lightning", tmp_path / "pl", theirs)
    assert [step for step, _ in a] == list(range(1, 16)) == [step for step, _ in b]
    assert [loss for _, loss in a] == pytest.approx([loss for _, loss in b], rel=1e-6)
    assert outcome.steps == outcome.steps_now == 15
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)
    assert ours.total_steps == 15


def test_the_method_itself_is_trained_and_nothing_is_printed(tmp_path, capfd):
    model, seen = method(), []
    before = copy.deepcopy(model.state_dict())
    train("mmengine", tmp_path, model, on_epoch=lambda epoch: seen.append((epoch, model.steps, model.training)))
    assert seen == [(1, 5, True), (2, 10, True), (3, 15, True)]
    assert not torch.equal(before["query_encoder.backbone.0.weight"], model.query_encoder.backbone[0].weight)
    out, err = capfd.readouterr()
    assert out == ""
    assert "INFO" not in err


def test_an_interrupted_job_ends_like_a_whole_one(tmp_path):
    whole, cut = method(), method()
    all_steps, _ = train("mmengine", tmp_path / "whole", whole)

    def stop(step, loss):
        first.append((step, loss))
        if step == 8:
            raise Interrupted

    first = []
    with pytest.raises(Interrupted):
        train("mmengine", tmp_path / "cut", cut, on_step=stop)
    again = method()
    rest, outcome = train("mmengine", tmp_path / "cut", again)
    assert rest[0][0] == 6
    assert (outcome.steps, outcome.steps_now) == (15, 10)
    assert first[:5] + rest == all_steps
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    done, outcome = train("mmengine", tmp_path / "cut", method())
    assert (done, outcome.steps, outcome.steps_now) == ([], 15, 0)


def test_accumulated_iterations_are_one_step(tmp_path):
    model = method(queue_size=60)
    steps, outcome = train("mmengine", tmp_path, model, options={"accumulative_counts": 2})
    assert [step for step, _ in steps] == list(range(1, 9))  # 15 iterations, the last step of one
    assert outcome.steps == model.steps == model.total_steps == 8


def test_bfloat16_trains_on_the_cpu(tmp_path):
    seen = []

    class Watched(nn.Module):
        def forward(self, x):
            seen.append(x.dtype)
            return x

    model = method()
    model.query_encoder.projector.append(Watched())
    steps, _ = train("mmengine", tmp_path, model, precision="bf16-mixed", epochs=1)
    assert seen[0] == torch.bfloat16
    assert all(torch.isfinite(torch.tensor(loss)) for _, loss in steps)


def test_what_the_engine_cannot_do_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"num_nodes=2.*torchrun --nnodes=2"):
        train("mmengine", tmp_path, method(), num_nodes=2)
    with pytest.raises(ValueError, match="precision='16-mixed' on cpu"):
        train("mmengine", tmp_path, method(), precision="16-mixed")
