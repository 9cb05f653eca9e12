"""lightly's methods: each step equals the plain composition of lightly's own parts, in lightly's own order."""

from __future__ import annotations

import copy
import inspect
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from lightly import loss as losses
from lightly.models import utils
from lightly.models.modules.memory_bank import MemoryBankModule
from lightly.models.modules.nn_memory_bank import NNMemoryBankModule
from torch import nn

from moco_plugins import Cosine
from moco_plugins.hooks import manager as plugins
from moco_plugins.hooks.method import Method
from moco_plugins.steps import distributed

DIM, HIDDEN, STEPS = 12, 24, 9
OPTIONS = {
    "simclr": {},
    "byol": {"momentum": Cosine(0.9, 1.0)},
    "simsiam": {},
    "barlow-twins": {},
    "vicreg": {},
    "nnclr": {"prediction_hidden_dim": 24, "queue_size": 32},
    "swav": {"prototypes": 10, "queue_size": 16, "queue_start": 0.3, "frozen": 0.25},
    "dino": {"bottleneck_dim": 8, "momentum": Cosine(0.9, 1.0), "frozen": 0.25},
}
NAMES = list(OPTIONS)


def backbone(batch_norm: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(48, 24),
        nn.BatchNorm1d(24) if batch_norm else nn.Identity(),
        nn.ReLU(),
        nn.Linear(24, 16),
    )


def build(name: str, batch_norm: bool = True, **changes) -> nn.Module:
    torch.manual_seed(1)
    options = {"projection_dim": DIM, "hidden_dim": HIDDEN, **OPTIONS[name], **changes}
    method = plugins.method_factory(name)(backbone(batch_norm), 16, **options).double()
    method.total_steps = STEPS
    return method


def views(n: int = 8) -> list[torch.Tensor]:
    x = torch.randn(n, 3, 4, 4, dtype=torch.double)
    return [x, x + 0.5 * torch.randn_like(x)]


class Plain:
    """The same weights, stepped as lightly's examples and benchmarks do it."""

    def __init__(self, name: str, method: nn.Module) -> None:
        self.name, self.step = name, 0
        parts = method.encoder, getattr(method, "predictor", None), getattr(method, "prototypes", None)
        self.encoder, self.predictor, self.prototypes = (copy_of(p) for p in parts)
        self.teacher = copy_of(self.encoder)
        self.cosine, self.ntxent = (
            losses.NegativeCosineSimilarity(),
            losses.NTXentLoss(0.1 if name == "simclr" else 0.5),
        )
        self.dino = losses.DINOLoss(DIM).double()
        if name == "nnclr":
            self.bank = NNMemoryBankModule((32, DIM)).double()
            self.bank.bank.copy_(method.queue.keys)
        if name == "swav":
            self.queues = [MemoryBankModule((16, DIM)).double() for _ in range(2)]
        self.parameters = [p for m in (self.encoder, self.predictor, self.prototypes) if m for p in m.parameters()]

    def move_teacher(self) -> None:
        utils.update_momentum(self.encoder, self.teacher, m=Cosine(0.9, 1.0)(self.step, STEPS))

    def loss(self, v) -> torch.Tensor:
        return getattr(self, self.name.replace("-", "_"))(*v)

    def simclr(self, a, b):
        return self.ntxent(*self.encoder(torch.cat([a, b])).chunk(2))

    def barlow_twins(self, a, b):
        return losses.BarlowTwinsLoss()(*self.encoder(torch.cat([a, b])).chunk(2))

    def vicreg(self, a, b):
        return losses.VICRegLoss()(*self.encoder(torch.cat([a, b])).chunk(2))

    def byol(self, a, b):
        self.move_teacher()
        with torch.no_grad():
            t0, t1 = self.teacher(a), self.teacher(b)
        p0, p1 = self.predictor(self.encoder(a)), self.predictor(self.encoder(b))
        return 2 * self.cosine(t0, p1) + 2 * self.cosine(t1, p0)

    def simsiam(self, a, b):
        z0, z1 = self.encoder(a), self.encoder(b)
        p0, p1 = self.predictor(z0), self.predictor(z1)
        return 0.5 * (self.cosine(z0.detach(), p1) + self.cosine(z1.detach(), p0))

    def nnclr(self, a, b):
        z0, z1 = self.encoder(a), self.encoder(b)
        p0, p1 = self.predictor(z0), self.predictor(z1)
        z0, z1 = self.bank(z0.detach(), update=False), self.bank(z1.detach(), update=True)
        return 0.5 * (self.ntxent(z0, p1) + self.ntxent(z1, p0))

    def swav(self, a, b):
        self.prototypes.normalize()
        projections = [F.normalize(self.encoder(x), dim=1) for x in (a, b)]
        queued = None
        if self.step >= 0.3 * STEPS:
            banks = [q(z.detach(), update=True)[1].T for q, z in zip(self.queues, projections, strict=True)]
            if self.step >= 0.3 * STEPS + 2:  # 2 batches of 8 fill a queue of 16
                queued = [self.prototypes(bank).detach() for bank in banks]
        return losses.SwaVLoss()([self.prototypes(z) for z in projections], [], queued).squeeze()

    def dino(self, a, b):  # replaced below: the attribute of this name is lightly's loss
        raise NotImplementedError

    def dino_loss(self, a, b):
        self.move_teacher()
        both = torch.cat([a, b])
        with torch.no_grad():
            teacher = self.teacher(both)
        return self.dino(teacher.chunk(2), self.encoder(both).chunk(2), teacher_temp=0.04)

    def freeze(self) -> None:
        """lightly's benchmark keeps SwAV's prototypes and DINO's last layer fixed in the first epoch."""
        if self.step < 0.25 * STEPS and self.name in ("swav", "dino"):
            fixed = self.prototypes if self.name == "swav" else self.encoder.projector.last_layer
            for parameter in fixed.parameters():
                parameter.grad = None


def copy_of(module):
    """A deep copy; torch's old weight_norm, in lightly's DINO head, leaves a tensor that cannot be copied."""
    if module is None:
        return None
    for part in module.modules():
        if hasattr(part, "weight_g"):
            part.weight = part.weight.detach()
    return copy.deepcopy(module)


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_plain_composition(name):
    method = build(name)
    plain = Plain(name, method)
    if name == "dino":
        plain.loss = lambda v: plain.dino_loss(*v)
    optimizers = [torch.optim.SGD(p, 0.05, momentum=0.9) for p in (method.parameters(), plain.parameters)]
    torch.manual_seed(2)
    for step in range(STEPS):
        v = views()
        ours, theirs = method(v), plain.loss(v)
        assert ours.ndim == 0
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-9, abs=1e-9), step
        for optimizer, loss in zip(optimizers, (ours, theirs), strict=True):
            optimizer.zero_grad()
            loss.backward()
        plain.freeze()
        for optimizer in optimizers:
            optimizer.step()
        plain.step += 1
    for (key, ours), theirs in zip(
        method.encoder.state_dict().items(), plain.encoder.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9, msg=key)
    if name in ("byol", "dino"):
        assert method.metrics()["momentum"] == 1.0
    if name == "dino":
        torch.testing.assert_close(method.criterion.center, plain.dino.center)


@pytest.mark.parametrize("name", NAMES)
def test_is_a_method_and_tells_what_it_sees(name):
    method = build(name)
    assert isinstance(method, Method)
    assert method.metrics() == {}
    loss = method(views())
    loss.backward()
    assert all(p.grad is not None for p in method.parameters() if p.requires_grad)  # DDP's default flags need that
    metrics = method.metrics()
    assert metrics["loss"] == pytest.approx(loss.item())
    assert metrics["effective_rank"] > 1
    assert method.embed(views()[0]).shape == (8, 16)


@pytest.mark.parametrize("name", NAMES)
def test_eval_mode_changes_nothing(name):
    method = build(name)
    optimizer = torch.optim.SGD(method.parameters(), 0.05)
    for _ in range(STEPS):
        method(views()).backward()
        optimizer.step()
    method.eval()
    state = copy.deepcopy(method.state_dict())
    method(views())
    with torch.no_grad():
        method(views())
    optimizer.zero_grad()
    optimizer.step()
    after = method.state_dict()
    assert all(torch.equal(state[key], after[key]) for key in state)


STEPPED = ["byol", "nnclr", "swav", "dino"]


def mean_over_parts(method: nn.Module, v, parts: int) -> None:
    size = v[0].shape[0] // parts
    for i in range(parts):
        (method([x[i * size : (i + 1) * size] for x in v]) / parts).backward()


@pytest.mark.parametrize("name", ["byol", "dino"])
def test_accumulation_moves_the_teacher_once(name):
    """Without BatchNorm and with a loss that is a mean over images, four quarters are one whole."""
    without = {"batch_norm": False}
    whole, parts = build(name, **without), build(name, **without)
    for method in (whole, parts):  # the heads' own BatchNorm
        for module in method.modules():
            for child, layer in module.named_children():
                if isinstance(layer, nn.BatchNorm1d):
                    setattr(module, child, nn.Identity())
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (whole, parts)]
    for _ in range(4):
        v = views(16)
        whole(v).backward()
        mean_over_parts(parts, v, 4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert whole.steps == parts.steps == 4
    for (key, a), b in zip(whole.state_dict().items(), parts.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=key)


@pytest.mark.parametrize("name", STEPPED)
def test_state_is_complete(name):
    """Ten steps, and five more after loading, are fifteen; also through weights_only loading."""
    torch.manual_seed(5)
    batches = [views() for _ in range(STEPS)]

    def run(method, optimizer, part):
        out = []
        for v in part:
            loss = method(v)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    whole, first, second = build(name), build(name), build(name)
    expected = run(whole, torch.optim.SGD(whole.parameters(), 0.05), batches)
    got = run(first, torch.optim.SGD(first.parameters(), 0.05), batches[:5])
    second.load_state_dict(first.state_dict())
    got += run(second, torch.optim.SGD(second.parameters(), 0.05), batches[5:])
    assert got == expected
    assert whole.steps == second.steps == STEPS


@pytest.mark.parametrize("name", STEPPED)
def test_a_foreign_step_is_not_ours(name):
    method = build(name)
    method(views()).backward()
    probe = nn.Linear(2, 2)
    probe(torch.randn(1, 2)).sum().backward()
    torch.optim.SGD(probe.parameters(), 0.1).step()
    assert method.steps == 0
    torch.optim.SGD(method.parameters(), 0.1).step()
    assert method.steps == 1


def test_the_teacher_starts_equal_after_weights_were_loaded():
    method = build("byol")
    with torch.no_grad():
        for parameter in method.encoder.parameters():
            parameter.add_(1.0)
    method(views())
    for a, b in zip(method.encoder.parameters(), method.teacher.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not b.requires_grad


def test_prototypes_stay_on_the_sphere():
    method = build("swav", frozen=0.0)
    optimizer = torch.optim.SGD(method.parameters(), 0.5)
    before = method.prototypes.heads[0].weight.clone()
    method(views()).backward()
    optimizer.step()
    weight = method.prototypes.heads[0].weight
    torch.testing.assert_close(weight.norm(dim=1), torch.ones(10, dtype=torch.double))
    assert not torch.equal(weight, before)


def two_rank_losses(name: str, v) -> dict:
    method = build(name, batch_norm=False)
    ddp = nn.parallel.DistributedDataParallel(method)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    for x in v:
        half = x[0].shape[0] // 2
        mine = slice(distributed.rank() * half, (distributed.rank() + 1) * half)
        optimizer.zero_grad()
        ddp([part[mine] for part in x]).backward()
        optimizer.step()
    return {k: t for k, t in method.state_dict().items() if "running" not in k}


@pytest.mark.parametrize("name", STEPPED)
def test_two_ranks_agree(name, two_ranks):
    """Default DDP flags, queue, center and teacher the same on both ranks."""
    torch.manual_seed(4)
    first, second = two_ranks.run(two_rank_losses, name, [views() for _ in range(STEPS)])
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_bad_views_are_named():
    method = build("simclr")
    with pytest.raises(TypeError, match="one tensor"):
        method(views()[0])
    with pytest.raises(ValueError, match="8 and 3 images"):
        method([views()[0], views(3)[0]])
    with pytest.raises(ValueError, match=r"momentum=0.01"):
        build("byol", momentum=0.01)


def test_factories_show_their_options_and_import_lightly_late():
    signature = inspect.signature(plugins.method_factory("byol"))
    assert list(signature.parameters)[:2] == ["backbone", "feature_dim"]
    assert signature.parameters["hidden_dim"].default == 4096
    script = """
        import sys
        from moco_plugins import plugins
        import moco_lightly
        plugins.methods(), plugins.adapters()
        print([m for m in ("lightly", "pytorch_lightning", "lightning") if m in sys.modules])
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_missing_lightly_says_what_to_install():
    script = """
        import sys
        sys.modules.update(dict.fromkeys(["lightly", "lightly.models", "pytorch_lightning", "lightning"]))
        from torch import nn
        from moco_plugins import plugins
        for call in (lambda: plugins.method_factory("byol")(nn.Identity(), 4), lambda: __import__("moco_lightly").MoCoModule):
            try:
                call()
            except ImportError as error:
                print(error)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    lines = run.stdout.strip().splitlines()
    assert len(lines) == 2
    assert all('pip install "moco-plugins[lightly]"' in line for line in lines), run.stdout
