"""MoCoModule through Lightning's whole range, on real digits."""

from __future__ import annotations

import copy
import math
import os

import pytest
import pytorch_lightning as pl
import torch
from lightly.data.multi_view_collate import MultiViewCollate
from lightning_digits import Digits, MoCoModule, backbone, build, fit, loader, same, state, trainer
from moco_lightly import MoCoLoss, lightning_module_class
from moco_lightly.batches import images, two_views
from moco_lightly.probes import FeatureMemory, OnlineLinearProbe
from torch import nn
from torch.utils.data import DataLoader

from moco_plugins import Cosine, MoCo
from moco_plugins.steps import distributed


def plain_training(epochs=2, batch=24, count=96, module=None):
    """The same module in a loop of its own."""
    module = module or build()
    total = epochs * math.ceil(count / batch)
    optimizer = module.recipe.build_optimizer(module.moco, batch)
    schedule = module.recipe.build_schedule(optimizer, total, 0)
    module.moco.total_steps = total
    for _ in range(epochs):
        for views, _ in loader(count, batch):
            loss = module.moco(views)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return module


def test_equals_a_plain_loop():
    module = build()
    fit(module)
    assert same(state(module), state(plain_training()))
    assert module.moco.steps == 8
    assert module.moco.total_steps == 8


@pytest.mark.parametrize("form", ["plain", "lightly", "views"])
def test_batch_formats(form):
    module = build()
    collate = MultiViewCollate() if form == "lightly" else None
    fit(module, DataLoader(Digits(48, form), 24, collate_fn=collate), max_epochs=1)
    reference = build()
    fit(reference, loader(48), max_epochs=1)
    assert same(state(module), state(reference))


def test_a_batch_without_two_views_says_what_to_add():
    with pytest.raises(TypeError, match="MoCoV2Transform"):
        fit(build(), loader(form="single"))
    x = torch.rand(2, 1, 8, 8)
    for bad in (x, {"image": x}, [x, torch.zeros(2)], [[x, x, x], torch.zeros(2)], "batch"):
        with pytest.raises(TypeError, match="no two views"):
            two_views(bad)
    assert images([[x, x], torch.zeros(2)])[0] is x
    with pytest.raises(TypeError, match=r"\(images, targets\)"):
        images({"image": x})


def test_hyper_parameters_are_saved_and_loaded(tmp_path):
    module = build(momentum=[0.9, 1.0], num_classes=10, symmetric=True)
    t = fit(module, max_epochs=1)
    t.save_checkpoint(tmp_path / "m.ckpt")
    torch.load(tmp_path / "m.ckpt", weights_only=True)  # what older versions of Lightning do not ask for
    again = MoCoModule.load_from_checkpoint(tmp_path / "m.ckpt", backbone=backbone())
    assert same(state(module), state(again))
    assert again.moco.settings.momentum == Cosine(0.9, 1.0)
    assert again.moco.settings.symmetric
    assert again.hparams["queue_size"] == 70
    function = build(momentum=Cosine(0.9, 1.0))  # a schedule that is code is left out, and not pickled
    assert "momentum" not in function.hparams


@pytest.mark.parametrize("name", ["convnet", "resnet18-cifar", "timm/resnet10t"])
def test_backbone_by_name_is_saved_with_the_rest(name, tmp_path):
    module = MoCoModule(name, channels=1, image_size=8, queue_size=32, projection_dim=8)
    t = fit(module, loader(48), max_epochs=1)
    t.save_checkpoint(tmp_path / "m.ckpt")
    torch.load(tmp_path / "m.ckpt", weights_only=True)
    again = MoCoModule.load_from_checkpoint(tmp_path / "m.ckpt")
    assert same(state(module), state(again))
    with pytest.raises(ValueError, match="feature_dim=None"):
        MoCoModule(backbone())


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars"])
def test_optimizers(name):
    module = build(optimizer=name, decay_all=False, batch_norm=True, warmup_epochs=1)
    t = fit(module, accumulate_grad_batches=2, max_epochs=4)
    (optimizer,) = t.optimizers
    assert type(optimizer).__name__.lower() == name
    decaying, others = optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (1e-4, 0.0)
    assert all(p.ndim >= 2 for p in decaying["params"])
    assert all(p.ndim < 2 for p in others["params"])
    assert decaying["initial_lr"] == pytest.approx(0.5 * 24 * 2 / 256)  # lr for 256, scaled by the global batch
    # 4 epochs of 2 steps: two of warm-up, then a cosine to zero
    schedule = t.lr_scheduler_configs[0].scheduler
    factors = [schedule.lr_lambdas[0](step) for step in range(9)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors[-1] == pytest.approx(0)
    assert schedule.last_epoch == 8


def test_lr_scaling_asks_for_the_batch_size_where_it_is_not_known():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([next(iter(loader()))])

    stream = DataLoader(Stream(), batch_size=None)
    with pytest.raises(ValueError, match="batch_size=None"):
        fit(build(), stream, max_steps=1)
    fit(build(batch_size=24), stream, max_steps=1)
    fit(build(scale_lr=False), stream, max_steps=1)
    for bad in ({"optimizer": "adam"}, {"schedule": "step"}, {"lr": 0.0}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            build(**bad)


def test_metrics_are_logged():
    t = fit(build(num_classes=10), val=loader(form="single"))
    logged = t.callback_metrics
    assert {"train_loss", "train_probe_top1", "val_probe_top1", "val_knn_top1", "moco/effective_rank"} <= set(logged)
    assert logged["val_knn_top1"] > 0.5
    assert logged["val_probe_top1"] > 0.5
    assert logged["moco/queue_filled"] == 1


def test_online_evaluation_leaves_the_training_alone():
    """Not even through the norm of clipped gradients, the optimiser or the random numbers."""
    runs = []
    for classes, val in ((None, None), (10, loader(form="single"))):
        module = build(num_classes=classes, batch_norm=True)
        fit(module, val=val, gradient_clip_val=0.01)
        runs.append(state(module))
    assert same(*runs)


def test_knn_with_a_bank_of_its_own():
    module = build(num_classes=10, batch_norm=True)
    before = state(module)
    t = trainer()
    bank, queries = loader(form="single"), loader(count=48, form="single")
    (result, *_) = t.validate(module, [bank, queries], verbose=False)
    assert same(before, state(module))
    assert result["val_knn_top1"] > 0.8  # the queries are in the bank


def test_validation_and_sanity_check_change_nothing():
    module, seen = build(batch_norm=True, num_classes=10), []

    class Watch(pl.Callback):
        def on_validation_start(self, trainer, module):
            self.before = state(module)

        def on_validation_end(self, trainer, module):
            seen.append((trainer.sanity_checking, same(self.before, state(module))))

    fit(module, val=loader(form="single"), callbacks=[Watch()], val_check_interval=0.5)
    assert seen == [(True, True)] + [(False, True)] * 4
    assert module.moco.training


def test_accumulation_with_an_uneven_last_window():
    """96 images in batches of 12: windows of 3, 3 and 2 are batches of 36, 36 and 24."""
    module = build(scale_lr=False, schedule="constant", lr=0.05)
    t = fit(module, loader(batch=12), accumulate_grad_batches=3, max_epochs=1)
    assert (t.global_step, module.moco.steps) == (3, 3)
    whole = build(scale_lr=False, schedule="constant", lr=0.05)
    optimizer = whole.recipe.build_optimizer(whole.moco, None)
    digits = Digits()
    for rows in torch.arange(96).split(36):
        views = [digits.images[rows], digits.others[rows]]
        optimizer.zero_grad()
        # Lightning divides each batch's loss by 3 also where the window has 2.
        (whole.moco(views) * len(rows) / 36).backward()
        optimizer.step()
    for name, value in state(whole).items():
        torch.testing.assert_close(value, state(module)[name], atol=1e-6, rtol=1e-5, msg=name)


def test_bf16_and_clipping():
    module = build(batch_norm=True)
    t = fit(module, precision="bf16-mixed", gradient_clip_val=0.5)
    assert module.moco.queue.keys.dtype == torch.float32
    assert math.isfinite(t.callback_metrics["train_loss"])
    assert module.moco.steps == 8
    assert int(module.moco.queue.filled) == 70


def test_fast_dev_run():
    module = build(num_classes=10)
    fit(module, val=loader(form="single"), fast_dev_run=True)
    assert module.moco.steps == 1


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}], ids=str)
def test_resume_is_bit_identical(options, tmp_path):
    whole = build(batch_norm=True, num_classes=10, momentum=[0.9, 1.0])
    keep = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    fit(whole, max_epochs=4, callbacks=[keep], enable_checkpointing=True, **options)
    resumed = build(batch_norm=True, num_classes=10, momentum=[0.9, 1.0])
    fit(resumed, max_epochs=4, ckpt_path=str(tmp_path / "epoch=1.ckpt"), **options)
    assert resumed.moco.steps == whole.moco.steps
    assert same(state(whole), state(resumed))
    assert same(whole.state_dict(), resumed.state_dict())


def test_compiled_module_equals_eager():
    torch._dynamo.reset()
    module = build()
    fit(torch.compile(module, backend="eager"), max_steps=3)
    assert module.moco.steps == 3
    eager = build()
    fit(eager, max_steps=3)
    for name, value in state(eager).items():
        torch.testing.assert_close(value, state(module)[name], atol=1e-5, rtol=1e-4, msg=name)


class Manual(pl.LightningModule):
    """A user's own module: manual optimisation, a probe with its own optimiser, MoCoLoss."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.encoder, self.probe = backbone(), nn.Linear(16, 10)
        self.criterion = MoCoLoss(0.2, (70, 16))

    def training_step(self, batch, batch_idx):
        (x_q, x_k), targets = batch
        main, probe = self.optimizers()
        query = self.encoder(x_q)
        probe_loss = nn.functional.cross_entropy(self.probe(query.detach()), targets)
        self.manual_backward(self.criterion(query, self.encoder(x_k).detach()) + probe_loss)
        probe.step()  # commits nothing
        filled = int(self.criterion.queue.filled)
        if batch_idx % 2:
            main.step()
            assert int(self.criterion.queue.filled) == min(70, filled + 48)
            main.zero_grad()
        else:
            assert int(self.criterion.queue.filled) == filled
        probe.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.encoder, self.probe)]


def test_manual_optimization():
    module = Manual()
    fit(module)
    assert int(module.criterion.queue.filled) == 70


def test_both_names_of_lightning():
    L = pytest.importorskip("lightning")
    other = build(lightning_module_class("lightning"))
    fit(other, framework=L)
    ours = build()
    fit(ours)
    assert isinstance(other, L.LightningModule)
    assert not isinstance(ours, L.LightningModule)
    assert same(state(ours), state(other))
    with pytest.raises(ValueError, match="lightning='bolts'"):
        lightning_module_class("bolts")


def fit_on_two(variant: str) -> dict:
    os.environ["LOCAL_RANK"] = str(distributed.rank())  # Lightning joins the group that is there
    module = build(variant=variant, num_classes=10)
    # Lightning leaves a distributed sampler as it is; its own would shuffle.
    sampler = torch.utils.data.DistributedSampler(Digits(), shuffle=False)
    fit(module, DataLoader(Digits(), 12, sampler=sampler), loader(form="single"), devices=2, strategy="ddp")
    return module.state_dict()


@pytest.mark.parametrize("variant", ["v2", "v2+"])
def test_ddp_equals_one_process_on_the_joined_batch(variant, two_ranks):
    first, second = two_ranks.run(fit_on_two, variant)
    one = build(variant=variant, num_classes=10)
    # The sampler gives rank r the images r, r + 2, ...: the joined batch in rank order.
    order = [i for start in range(0, 96, 24) for r in range(2) for i in range(start + r, start + 24, 2)]
    fit(one, DataLoader(torch.utils.data.Subset(Digits(), order), 24), loader(form="single"))
    for name, value in one.state_dict().items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], value, atol=1e-5, rtol=1e-4, msg=name)


def fit_with_checkpoints(folder, devices: int, gather: str, epochs: int, resume: str | None = None) -> dict:
    if devices > 1:
        os.environ["LOCAL_RANK"] = str(distributed.rank())
    keep = pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    sampler = torch.utils.data.DistributedSampler(Digits(), shuffle=False) if devices > 1 else None
    module = build(variant="v2+", gather=gather)
    options = {"devices": devices, **({"strategy": "ddp"} if devices > 1 else {})}
    data = DataLoader(Digits(), 24 // devices, sampler=sampler)
    # epochs are numbers from 0 in the names that Lightning gives
    fit(module, data, callbacks=[keep], enable_checkpointing=True, max_epochs=epochs, ckpt_path=resume, **options)
    return module.state_dict()


def test_a_queue_that_is_shared_out_is_saved_whole_and_resumed_on_one_and_two_ranks(two_ranks, tmp_path):
    whole, _ = two_ranks.run(fit_with_checkpoints, tmp_path / "whole", 2, "whole", 2)
    shared, _ = two_ranks.run(fit_with_checkpoints, tmp_path / "shared", 2, "sharded", 2)
    first = str(tmp_path / "shared" / "epoch=0.ckpt")
    saved = torch.load(first, weights_only=True)["state_dict"]
    assert saved["moco.queue.keys"].shape == (70, 8)
    again, _ = two_ranks.run(fit_with_checkpoints, tmp_path / "again", 2, "sharded", 2, first)
    alone = fit_with_checkpoints(tmp_path / "alone", 1, "whole", 2, first)
    for name, value in whole.items():
        torch.testing.assert_close(shared[name], value, atol=1e-5, rtol=1e-5, msg=name)
        torch.testing.assert_close(again[name], shared[name], atol=1e-6, rtol=1e-6, msg=name)
        if name != "moco.queue.keys":  # alone, images of a batch come in another order
            torch.testing.assert_close(alone[name], value, atol=1e-4, rtol=1e-4, msg=name)


def test_labels_and_image_numbers_reach_a_method_that_asks_for_them():
    """The queue then knows which image and which class each key is of."""
    module = build(loss="supcon", queue_size=120, queue_options={"columns": {"id": torch.long}})
    fit(module, loader(form="lightly"), max_epochs=1)
    columns, digits = module.moco.queue.columns, Digits()
    # lightly's file names are numbered; each image has been seen once, in order
    assert columns["id"][:96].unique().numel() == 96
    assert columns["id"][96:].tolist() == [-1] * 24
    assert torch.equal(columns["label"][:96], digits.labels[:96])
    assert columns["label"][96:].tolist() == [-1] * 24


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(20, 16), nn.BatchNorm1d(16)

    def forward(self, batch):
        mask = batch["mask"][:, :, None]
        return self.norm((self.table(batch["input_ids"]) * mask).sum(1) / mask.sum(1))


def token_loader():
    generator = torch.Generator().manual_seed(0)

    def view():
        return {"input_ids": torch.randint(0, 20, (5,), generator=generator), "mask": torch.ones(5)}

    return DataLoader([([view(), view()], i % 3) for i in range(48)], 12)


def test_views_may_be_dicts_of_tensors():
    """Equal to a plain loop over the same batches."""
    torch.manual_seed(0)
    module = MoCoModule(Tokens(), 16, queue_size=32, projection_dim=8, momentum=0.9, lr=0.5)
    plain = copy.deepcopy(module)
    fit(module, token_loader(), max_epochs=1)
    assert module.moco.steps == 4
    plain.moco.total_steps = 4
    optimizer = plain.recipe.build_optimizer(plain.moco, 12)
    schedule = plain.recipe.build_schedule(optimizer, 4, 0)
    for views, _ in token_loader():
        optimizer.zero_grad()
        plain.moco(views).backward()
        optimizer.step()
        schedule.step()
    assert same(state(module), state(plain))


def test_probe_learns_and_draws_no_random_numbers():
    before = torch.get_rng_state()
    probe = OnlineLinearProbe(64, 10)
    digits = Digits(400)
    features = 1000 * digits.images.flatten(1)  # the scale does not matter
    for _ in range(50):
        probe.learn(features, digits.labels)
    assert (probe(features).argmax(1) == digits.labels).float().mean() > 0.9
    assert torch.equal(before, torch.get_rng_state())
    assert not list(probe.parameters())


def test_memory_keeps_the_newest():
    memory = FeatureMemory(2, 10)
    for i in range(6):
        memory.add(torch.full((4, 2), float(i)), torch.tensor([i, i, i, -1]))
        assert sum(map(len, memory.targets)) <= 24
    features, targets = memory.collect(torch.device("cpu"))
    assert targets.tolist() == [2] + [3] * 3 + [4] * 3 + [5] * 3  # no row without a label
    assert features[:, 0].tolist() == targets.tolist()
    memory.clear()
    assert memory.collect(torch.device("cpu"))[0].shape == (0, 2)


def test_moco_alone_in_a_users_module():
    """MoCo itself needs no hook of Lightning either."""

    class Own(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.moco = MoCo(backbone(), 16, queue_size=70, projection_dim=8)

        def training_step(self, batch, batch_idx):
            return self.moco(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Own()
    fit(module)
    assert module.moco.steps == 8
