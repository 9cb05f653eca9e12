"""What users of Lightning do with a module, besides fitting it: each works, or says what to do instead."""

from __future__ import annotations

import math
import os
import warnings

import pytest
import pytorch_lightning as pl
import torch
from lightning_digits import Digits, MoCoModule, backbone, build, fit, loader, state, trainer
from moco_lightly.batches import two_views
from pytorch_lightning.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from moco_plugins import Cosine
from moco_plugins.steps import distributed


class Logged(pl.loggers.logger.DummyLogger):
    """Keeps what is logged: (step, metrics)."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict]] = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, dict(metrics)))

    def steps(self, name: str) -> list[int]:
        return [step for step, metrics in self.lines if name in metrics]


class Changed(Dataset):
    """Digits whose items are changed by a function of (views, label, index)."""

    def __init__(self, change, count: int = 96) -> None:
        self.digits, self.change = Digits(count), change

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, i):
        return self.change(*self.digits[i], i)


class Stream(IterableDataset):
    """Batches without end, and without a length."""

    def __iter__(self):
        while True:
            yield from loader()


def stream() -> DataLoader:
    return DataLoader(Stream(), batch_size=None)


# Metrics and the warning of collapse


def test_metrics_come_at_every_nth_step_of_the_training_and_once_an_epoch_at_least():
    logger = Logged()
    fit(build(), logger=logger, max_epochs=6, log_every_n_steps=6)  # 4 steps an epoch
    every_sixth = {5, 11, 17, 23}
    assert every_sixth <= set(logger.steps("moco/effective_rank"))
    epochs = {step // 4 for step in logger.steps("moco/effective_rank")}
    assert epochs == set(range(6))
    # With more steps than that nothing else is logged.
    logger = Logged()
    fit(build(), logger=logger, max_epochs=3, log_every_n_steps=2)
    assert logger.steps("moco/effective_rank") == [1, 3, 5, 7, 9, 11]


def test_metrics_come_with_fewer_batches_than_the_default_logging_interval():
    logger = Logged()
    t = fit(build(), logger=logger, log_every_n_steps=50)
    assert logger.steps("moco/feature_std") == [3, 7]
    assert "moco/feature_std" in t.callback_metrics


@pytest.mark.parametrize("options", [{"log_every_n_steps": 50}, {"log_every_n_steps": 0}, {"max_steps": 3}], ids=str)
def test_collapse_is_told_whatever_is_logged(options):
    module = build()

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.direction = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return self.direction + 0 * x[:, :8]

    module.moco.query_encoder.projector = Constant()
    module.moco.key_encoder.projector = Constant().requires_grad_(False)
    with pytest.warns(UserWarning, match="the features have collapsed"):
        fit(module, **options)


def test_metrics_are_those_of_the_training_and_not_of_a_validation_with_two_views():
    module = build()
    seen = []

    class Watch(pl.Callback):
        def on_validation_start(self, trainer, module):
            if not trainer.sanity_checking:
                seen.append(module._metrics["moco/loss"])

    t = fit(module, val=loader(48), callbacks=[Watch()], max_epochs=1, log_every_n_steps=50)
    assert t.callback_metrics["moco/loss"] == pytest.approx(seen[0])
    assert t.callback_metrics["moco/loss"] == pytest.approx(float(t.callback_metrics["train_loss"]), abs=1e-6)


# Schedules


@pytest.mark.parametrize(
    "limits", [{"max_epochs": 10}, {"max_steps": 60}, {"max_epochs": 10, "max_steps": 60}], ids=str
)
def test_warm_up_counts_epochs_in_batches_whatever_limits_the_training(limits):
    """96 images in batches of 16: 6 batches an epoch, 60 steps in all, 30 of warm-up."""
    module = build(warmup_epochs=5, momentum=[0.9, 1.0])
    rates = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    t = fit(module, loader(batch=16), **{"max_epochs": None, **limits}, callbacks=[Watch()])
    assert t.global_step == len(rates) == 60
    top = 0.5 * 16 / 256  # the batch size is found, too
    assert rates[:31] == pytest.approx([top * min(1, (step + 1) / 30) for step in range(31)])
    assert rates[-1] == pytest.approx(top * 0.5 * (1 + math.cos(math.pi * 29 / 30)))
    assert module.moco.total_steps == 60


@pytest.mark.parametrize("how", ["module", "hparams"])
def test_a_rate_that_is_set_is_the_rate_in_force(how, tmp_path):
    module = build(lr=0.03)
    if how == "module":
        module.lr = 0.5
    else:
        module.hparams.lr = 0.5
    t = fit(module, max_epochs=1)
    assert t.optimizers[0].param_groups[0]["initial_lr"] == 0.5
    assert module.lr == module.hparams.lr == 0.5
    t.save_checkpoint(tmp_path / "m.ckpt")
    again = MoCoModule.load_from_checkpoint(tmp_path / "m.ckpt", backbone=backbone())
    t = fit(again, max_epochs=1)
    assert t.optimizers[0].param_groups[0]["initial_lr"] == 0.5


def test_the_rate_that_the_tuner_finds_is_in_force(tmp_path):
    module = build(lr=0.03)
    t = trainer(default_root_dir=tmp_path, max_epochs=10)
    options = {"num_training": 30, "min_lr": 1e-3, "max_lr": 0.1, "early_stop_threshold": None}
    found = pl.tuner.Tuner(t).lr_find(module, loader(), **options)
    assert module.moco.steps == 0  # as before the search
    assert module.lr == found.suggestion() != 0.03
    t = fit(module, max_epochs=1)
    assert t.optimizers[0].param_groups[0]["initial_lr"] == module.lr


class OwnOptimizer(MoCoModule):
    def configure_optimizers(self):
        return torch.optim.SGD(self.moco.parameters(), 0.1)


def test_schedules_go_whoever_makes_the_optimiser():
    module = build(OwnOptimizer, momentum=[0.5, 1.0], temperature=Cosine(0.1, 0.3))
    fit(module)
    assert module.moco.total_steps == module.moco.steps == 8
    assert module.moco.momentum == pytest.approx(1.0)
    assert module.moco.temperature == pytest.approx(0.3)


def test_an_optimiser_from_the_command_line(tmp_path, monkeypatch):
    pytest.importorskip("jsonargparse")
    from moco_lightly.__main__ import main

    kept = []

    def on_train_end(module):
        kept.append((module.moco.total_steps, module.moco.momentum, module.trainer.optimizers[0]))

    monkeypatch.setattr(MoCoModule, "on_train_end", on_train_end)
    monkeypatch.setattr("moco_lightly.__main__.lightning_name", lambda: "pytorch_lightning")
    monkeypatch.setattr("sys.argv", ["moco_lightly"])
    monkeypatch.chdir(tmp_path)
    quiet = {"logger": "false", "enable_progress_bar": "false", "enable_model_summary": "false"}
    settings = {**quiet, "accelerator": "cpu", "max_epochs": "1", "limit_train_batches": "3", "limit_val_batches": "0"}
    model = {"backbone": "convnet", "channels": "1", "image_size": "8", "queue_size": "32", "momentum": "[0.5,1.0]"}
    data = {"data": "digits", "transform": "moco_plugins.TwoViews", "transform.image_size": "8", "batch_size": "16"}
    main(
        ["fit", "--optimizer=AdamW", "--optimizer.lr=0.002"]
        + [f"--trainer.{name}={value}" for name, value in settings.items()]
        + [f"--model.{name}={value}" for name, value in model.items()]
        + [f"--data.{name}={value}" for name, value in data.items()]
    )
    ((total, momentum, optimizer),) = kept
    assert (total, momentum) == (3, pytest.approx(1.0))
    assert type(optimizer) is torch.optim.AdamW


def test_a_loader_without_length_is_told_with_the_cure():
    module = build(scale_lr=False, warmup_epochs=1, momentum=[0.9, 1.0])
    with pytest.warns(UserWarning, match="the training loader has no length") as caught:
        fit(module, stream(), max_time={"seconds": 0.3})
    told = " ".join(str(w.message) for w in caught)
    for part in ("warmup_epochs=1 counts", "learning rate stays as it is", "schedule of momentum"):
        assert part in told
    assert told.count("Trainer(max_steps=...)") == 2


def test_with_the_cure_all_schedules_go_on_a_stream():
    module = build(scale_lr=False, warmup_epochs=1, momentum=[0.9, 1.0])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(no length|stands still|stays as it is).*")
        t = fit(module, stream(), max_epochs=-1, max_steps=8, limit_train_batches=4)
    assert module.moco.total_steps == module.moco.steps == 8
    schedule = t.lr_scheduler_configs[0].scheduler
    assert [schedule.lr_lambdas[0](step) for step in (0, 3, 4)] == [0.25, 1.0, 1.0]
    assert schedule.lr_lambdas[0](8) == pytest.approx(0)


# Data


def test_predict_returns_embeddings_with_targets_and_file_names():
    module = build()
    x = Digits(48).images
    named = DataLoader(Changed(lambda views, label, i: (views[0], label, f"{i}.png"), 48), 20)
    answers = trainer().predict(module, named)
    with torch.no_grad():
        expected = module.eval()(x)
    torch.testing.assert_close(torch.cat([a["embeddings"] for a in answers]), expected)
    assert torch.cat([a["targets"] for a in answers]).tolist() == Digits(48).labels.tolist()
    assert [name for a in answers for name in a["filenames"]] == [f"{i}.png" for i in range(48)]
    for form, keys in (
        ("single", {"embeddings", "targets"}),
        ("plain", {"embeddings", "targets"}),
        ("views", {"embeddings"}),
    ):
        answer, *_ = trainer().predict(module, loader(48, 20, form))
        assert set(answer) == keys
        torch.testing.assert_close(answer["embeddings"], expected[:20])
    answer, *_ = trainer().predict(module, DataLoader(x, 20))
    assert set(answer) == {"embeddings"}


def test_the_test_metrics_are_those_of_validation():
    module = build(num_classes=10)
    fit(module)
    data = [loader(form="single"), loader(count=48, form="single")]
    (val, *_), (test, *_) = trainer().validate(module, data, verbose=False), trainer().test(module, data, verbose=False)
    assert set(test) == {"test_probe_top1", "test_knn_top1"}
    assert {name.replace("val", "test"): value for name, value in val.items()} == test


def test_images_without_a_label_take_no_part():
    """As STL-10's own data module gives them: probe, bank and accuracies are those of the labelled images alone."""
    module = build(num_classes=10)
    fit(module, DataLoader(Changed(lambda views, label, i: (views, label if i % 4 == 0 else -1)), 24), max_epochs=8)
    assert torch.isfinite(module.probe.weight).all()
    _, labels = module._recent.collect(torch.device("cpu"))
    assert labels.tolist() == Digits().labels[::4].tolist()
    some = DataLoader(Changed(lambda views, label, i: (views[0], label if i % 2 else -1)), 24)
    those_alone = DataLoader(torch.utils.data.Subset(Digits(form="single"), range(1, 96, 2)), 24)
    results = [trainer().validate(module, data, verbose=False)[0] for data in (some, those_alone)]
    assert results[0] == pytest.approx(results[1])
    assert results[0]["val_probe_top1"] > 0.2
    banks = [
        trainer().validate(module, [data, loader(form="single")], verbose=False)[0] for data in (some, those_alone)
    ]
    assert banks[0] == pytest.approx(banks[1])


def test_a_step_of_the_probe_is_that_of_the_labelled_rows_alone():
    from moco_lightly.probes import OnlineLinearProbe

    digits = Digits(64)
    features, labels = digits.images.flatten(1), digits.labels.clone()
    some = torch.arange(64) % 3 == 0
    with_none, alone = OnlineLinearProbe(64, 10), OnlineLinearProbe(64, 10)
    for _ in range(4):
        told = with_none.learn(features, torch.where(some, labels, -1))
        expected = alone.learn(features[some], labels[some])
        torch.testing.assert_close(torch.stack(told), torch.stack(expected))
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(with_none.state_dict()[name], value, msg=name)
    before = {name: value.clone() for name, value in with_none.state_dict().items()}
    told = with_none.learn(features, torch.full((64,), -1))
    assert all(torch.isnan(value) for value in told)
    assert all(torch.equal(value, before[name]) for name, value in with_none.state_dict().items())


@pytest.mark.parametrize("form", ["all -1", "views"])
def test_no_label_at_all_is_said_once(form):
    module = build(num_classes=10)
    data = DataLoader(Changed(lambda v, y, i: (v, -1)), 24) if form == "all -1" else loader(form="views")
    with pytest.warns(UserWarning, match="num_classes=10 and no image of the training has a label") as caught:
        fit(module, data, max_epochs=3)
    assert len([w for w in caught if "no image of the training" in str(w.message)]) == 1


@pytest.mark.parametrize("kind", ["multi-label", "soft", "column"])
def test_labels_that_are_vectors_are_refused_with_words(kind):
    def label(views, label, i):
        one_hot = nn.functional.one_hot(torch.tensor(label), 10)
        return views, {"multi-label": one_hot, "soft": one_hot.float(), "column": torch.tensor([label])}[kind]

    data = DataLoader(Changed(label), 24)
    with pytest.raises(ValueError, match=r"one class an image, whole numbers \(N,\).*num_classes=None"):
        fit(build(num_classes=10), data)
    single = DataLoader(Changed(lambda v, y, i: (v[0], label(v, y, i)[1])), 24)
    with pytest.raises(ValueError, match="one class an image"):
        trainer().validate(build(num_classes=10), single, verbose=False)
    fit(build(), data, max_epochs=1)  # without a probe nobody asks for them


@pytest.mark.parametrize("kind", ["mask", "mask as image", "crop"])
def test_an_image_and_its_mask_are_not_two_views(kind):
    def pair(views, label, i):
        mask = {"mask": views[0] > 0.5, "mask as image": views[0].repeat(2, 1, 1), "crop": views[0][:, :4, :4]}[kind]
        return (views[0], mask)

    data = DataLoader(Changed(pair), 24)
    with pytest.raises(ValueError, match=r"a mask\?.*MoCoV2Transform"):
        fit(build(), data)
    x = torch.rand(4, 1, 8, 8)
    with pytest.raises(ValueError, match=r"a mask\?"):
        two_views([[x, x.bool()], torch.zeros(4)])


def test_the_batches_of_several_loaders_are_told_apart_by_key():
    """Labelled single images, labelled and unlabelled views: MoCo trains on the views of both."""
    x, noise = Digits(8).images, 0.1 * torch.randn(8, 1, 8, 8)
    a, b = [x[:4], x[:4] + noise[:4]], [x[4:], x[4:] + noise[4:]]
    views, targets = two_views({"labelled": [a, torch.arange(4)], "unlabelled": b, "images": [x, torch.arange(8)]})
    assert torch.equal(views[0], x)
    assert torch.equal(views[1], x + noise)
    assert targets.tolist() == [0, 1, 2, 3, -1, -1, -1, -1]
    assert two_views([[a, torch.arange(4)], None])[1].tolist() == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="a dict with 'images', 'masks'"):
        two_views({"images": x, "masks": x})
    with pytest.raises(ValueError, match="one shape"):
        two_views({"a": a, "b": [x[:, :, :4], x[:, :, :4] + 1]})


@pytest.mark.parametrize("combined", [True, False])
def test_a_combined_loader_trains(combined):
    parts = {"labelled": loader(48, 12), "unlabelled": loader(96, 24, "views"), "test": loader(48, 12, "single")}
    data = CombinedLoader(parts, "max_size_cycle") if combined else parts
    module = build(num_classes=10, batch_size=36)
    t = fit(module, data, max_epochs=1)
    assert module.moco.steps == 4
    assert int(module.moco.queue.filled) == 70
    assert t.optimizers[0].param_groups[0]["initial_lr"] == pytest.approx(0.5 * 36 / 256)
    assert torch.isfinite(module.probe.weight).all()


def test_the_loss_is_logged_where_validation_has_two_views():
    module = build(num_classes=10)
    fit(module, max_epochs=1)
    before = state(module)
    (result, *_) = trainer().validate(module, loader(60, 24), verbose=False)
    module.moco.eval()
    with torch.no_grad():
        parts = [(float(module.moco(views)), len(labels)) for views, labels in loader(60, 24)]
    assert result["val_loss"] == pytest.approx(sum(loss * n for loss, n in parts) / 60, rel=1e-5)
    assert {"val_probe_top1", "val_knn_top1"} <= set(result)
    assert all(torch.equal(value, before[name]) for name, value in state(module).items())
    (result, *_) = trainer().test(build(), loader(60, 24), verbose=False)
    assert set(result) == {"test_loss"}


def test_a_last_batch_of_one_image_is_named_with_the_cure():
    module = build(variant="v3", queue_size=None, hidden_dim=16)
    with pytest.raises(ValueError, match=r"batch 2 of the epoch has a single image.*drop_last=True"):
        fit(module, loader(49, 24))
    fit(build(variant="v3", queue_size=None, hidden_dim=16), DataLoader(Digits(49), 24, drop_last=True), max_epochs=1)


def test_a_queue_as_large_as_the_data_set_is_told_once_with_a_suggestion():
    with pytest.warns(UserWarning, match=r"queue_size=96 .*96 images.*Try queue_size=16") as caught:
        fit(build(queue_size=96))
    assert len([w for w in caught if "queue_size=96" in str(w.message)]) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="queue_size=")
        fit(build(queue_size=95), max_epochs=1)


def test_a_backbone_that_is_wholly_frozen_is_named():
    module = build()
    module.moco.query_encoder.backbone.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"backbone \(Sequential\).*requires_grad.*head alone"):
        fit(module, max_epochs=1)


def test_a_learnable_temperature_never_decays():
    for name in ("sgd", "adamw", "lars"):
        module = build(learnable_temperature=True, optimizer=name, weight_decay=0.1)
        t = fit(module, max_epochs=1)
        (group,) = [
            g for g in t.optimizers[0].param_groups if any(p is module.moco.log_temperature for p in g["params"])
        ]
        assert group["weight_decay"] == 0


class OnFirstRank(IterableDataset):
    def __init__(self, batches) -> None:
        self.batches = batches

    def __iter__(self):
        yield from self.batches if distributed.rank() == 0 else ()


def validate_on_two(sizes: list[int], padded: bool, two_view: bool) -> dict[str, float]:
    os.environ["LOCAL_RANK"] = str(distributed.rank())  # Lightning joins the group that is there
    module = build(num_classes=10)
    module.probe.weight.copy_(torch.randn(10, 16, generator=torch.Generator().manual_seed(0)))
    form = "plain" if two_view else "single"
    bank, queries = Digits(sizes[0], form), Digits(sizes[1], form)
    if padded:  # Lightning's own sampler: the first images once more, so that ranks have equally many
        loaders = [DataLoader(part, 10) for part in (bank, queries)]
    else:  # streams: all rows on the first rank
        loaders = [DataLoader(OnFirstRank(DataLoader(part, 10)), batch_size=None) for part in (bank, queries)]
    options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": padded}
    (result, *_) = trainer(**options).validate(module, loaders, verbose=False)
    return result


def validate_on_one(sizes: list[int], two_view: bool) -> dict[str, float]:
    module = build(num_classes=10)
    module.probe.weight.copy_(torch.randn(10, 16, generator=torch.Generator().manual_seed(0)))
    form = "plain" if two_view else "single"
    loaders = [DataLoader(Digits(size, form), 10) for size in sizes]
    return trainer().validate(module, loaders, verbose=False)[0]


@pytest.mark.parametrize("two_view", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_each_image_counts_once_on_two_ranks_and_none_waits(padded, two_view, two_ranks):
    sizes = [31, 21]  # odd, so that a sampler gives an image twice; or all of them on one rank
    expected = validate_on_one(sizes, two_view)
    assert set(expected) == {"val_probe_top1", "val_knn_top1"} | ({"val_loss"} if two_view else set())
    for result in two_ranks.run(validate_on_two, sizes, padded, two_view):
        assert result == pytest.approx(expected, rel=1e-5)
