"""Data sets, transforms, preprocessor, metrics: every form of batch that may come, and what wrong ones are told."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import default_collate as torch_collate

pytest.importorskip("mmengine")

from mmengine.dataset import default_collate, pseudo_collate
from mmengine.registry import DATASETS, METRICS, MODELS, TRANSFORMS
from mmengine.structures import BaseDataElement
from moco_mmengine import DataPreprocessor, TwoViews
from moco_mmengine.batches import labels_of

import moco_plugins as core
from moco_plugins.data.datasets import DATASETS as NAMED
from moco_plugins.data.datasets import digits

torch.set_num_threads(1)
TWO = {"type": "moco_plugins.TwoViews", "variant": "v2", "image_size": 8}


def model(**options):
    backbone = {"type": "moco_plugins.Backbone", "name": "convnet", "channels": 1, "image_size": 8}
    return MODELS.build({"type": "moco_plugins.MoCo", "backbone": backbone, "queue_size": 16, **options})


def samples(n=4, **options):
    data = DATASETS.build({"type": "moco_plugins.digits", "pipeline": [TWO], **options})
    return [data[i] for i in range(n)]


# Data sets


def test_a_data_set_by_name_and_its_parts():
    train, test = digits(None)
    data = DATASETS.build({"type": "moco_plugins.digits", "split": "train+test"})
    assert len(data) == len(train) + len(test)
    first, last = data[0], data[len(data) - 1]
    assert torch.equal(first["inputs"], train[0][0] / 255)
    assert torch.equal(last["inputs"], test[len(test) - 1][0] / 255)
    assert (first["data_samples"].split, last["data_samples"].split) == ("train", "test")
    assert last["data_samples"].gt_label == test[len(test) - 1][1]
    assert data[len(train)]["data_samples"].split == "test"
    assert data.metainfo["classes"] == tuple("0123456789")
    few = DATASETS.build({"type": "moco_plugins.ImageDataset", "name": "digits", "split": "train+test", "limit": 5})
    assert [few[i]["data_samples"].split for i in range(len(few))] == ["train"] * 5 + ["test"] * 5
    assert len(DATASETS.build({"type": "moco_plugins.ImageDataset", "name": "digits", "split": "test"})) == len(test)
    with pytest.raises(ValueError, match="split='valid'"):
        DATASETS.build({"type": "moco_plugins.digits", "split": "valid"})
    with pytest.raises(KeyError, match=r"moco_plugins\.imagenot.*mnist5k"):
        DATASETS.build({"type": "moco_plugins.imagenot"})


def test_images_without_labels_to_learn_from(monkeypatch):
    train, test = (part.subset(range(20)) for part in digits(None))
    train.pretrain = digits(None)[0]
    monkeypatch.setitem(NAMED, "digits", lambda root: (train, test))
    sizes = {
        split: len(DATASETS.build({"type": "moco_plugins.digits", "split": split})) for split in ("train", "pretrain")
    }
    assert sizes == {"train": 20, "pretrain": len(train.pretrain)}
    train.pretrain = None
    assert len(DATASETS.build({"type": "moco_plugins.digits", "split": "pretrain"})) == 20


def test_a_folder_of_images_and_torchvisions_names(tmp_path):
    for number in range(12):
        folder = tmp_path / "abc"[number % 3]
        folder.mkdir(exist_ok=True)
        Image.fromarray(np.full((9, 9, 3), 20 * number, np.uint8)).save(folder / f"{number}.png")
    data = DATASETS.build({"type": "moco_plugins.ImageFolder", "root": str(tmp_path), "pipeline": [TWO]})
    sample = data[0]
    assert [view.shape for view in sample["inputs"]] == [(3, 8, 8)] * 2
    with pytest.raises(FileNotFoundError, match=r"CIFAR10.*download=True"):
        DATASETS.build({"type": "moco_plugins.CIFAR10", "root": str(tmp_path)})


# Transforms


def test_two_views_take_whatever_pipelines_carry(tmp_path):
    views = TRANSFORMS.build(TWO)
    picture = np.zeros((12, 10, 3), np.uint8)
    picture[..., 0] = 255
    Image.fromarray(picture).save(tmp_path / "red.png")
    for image in ({"img": picture}, {"img": Image.fromarray(picture)}, {"img_path": str(tmp_path / "red.png")}):
        sample = views({**image, "gt_label": np.int64(3)})
        assert [view.shape for view in sample["inputs"]] == [(3, 8, 8)] * 2
        assert sample["data_samples"].gt_label == 3
    assert views({"img": np.zeros((12, 10), np.uint8)})["inputs"][0].shape == (1, 8, 8)
    assert views({"img": picture})["data_samples"].gt_label == -1
    with pytest.raises(TypeError, match=r"'image'.*'img' or 'img_path'"):
        views({"image": picture})


def test_bgr_becomes_rgb():
    from moco_mmengine.transforms import image_of

    blue_first = np.zeros((4, 4, 3), np.uint8)
    blue_first[..., 0] = 9
    assert image_of({"img": blue_first})[0].max() == 9
    assert image_of({"img": blue_first}, to_rgb=True)[2].max() == 9


# Batches


@pytest.mark.parametrize("collate", [pseudo_collate, default_collate])
def test_batches_of_our_pipeline(collate):
    batch = DataPreprocessor()(collate(samples()), training=True)
    assert [view.shape for view in batch["inputs"]] == [(4, 1, 8, 8)] * 2
    assert torch.isfinite(model()(**batch, mode="loss")["loss"])
    assert len(batch["data_samples"]) == 4


def test_batches_of_plain_torch():
    pairs = [((torch.full((1, 8, 8), i / 9), torch.rand(1, 8, 8)), i) for i in range(4)]
    batch = DataPreprocessor()(torch_collate(pairs), training=True)
    assert [view.shape for view in batch["inputs"]] == [(4, 1, 8, 8)] * 2
    assert batch["inputs"][0][:, 0, 0, 0].tolist() == pytest.approx([i / 9 for i in range(4)])
    assert batch["data_samples"].tolist() == [0, 1, 2, 3]
    views = [torch.rand(4, 1, 8, 8), torch.rand(4, 1, 8, 8)]
    assert DataPreprocessor()(views)["inputs"][1] is views[1]  # two views and no labels
    single = DataPreprocessor()((torch.rand(4, 1, 8, 8), torch.zeros(4)))
    assert single["inputs"].shape == (4, 1, 8, 8)


@pytest.mark.parametrize("collate", [pseudo_collate, default_collate])
def test_batches_as_mmpretrain_packs_them(collate):
    """MultiView and PackInputs give uint8 views in a list and a data element; they are normalised later."""
    packed = [
        {
            "inputs": [torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8) for _ in range(2)],
            "data_samples": BaseDataElement(metainfo={"img_path": "x"}),
        }
        for _ in range(4)
    ]
    batch = DataPreprocessor(mean=[0.5] * 3, std=[0.25] * 3)(collate(packed), training=True)
    want = (torch.stack([p["inputs"][1] for p in packed]) / 255 - 0.5) / 0.25
    assert torch.allclose(batch["inputs"][1], want)


def test_means_of_the_other_range_are_refused():
    with pytest.raises(ValueError, match=r"from 0 to 255.*mean=\[0\.485, 0\.456, 0\.406\]"):
        DataPreprocessor(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
    with pytest.raises(ValueError, match="go together"):
        DataPreprocessor(mean=[0.5])


def test_views_made_of_the_whole_batch_in_training_only():
    preprocessor = DataPreprocessor(views={"type": "moco_plugins.TwoViews", "variant": "affine", "image_size": 8})
    batch = pseudo_collate(samples(pipeline=[]))
    views = preprocessor(batch, training=True)["inputs"]
    assert [view.shape for view in views] == [(4, 1, 8, 8)] * 2
    assert not torch.equal(*views)
    assert torch.equal(preprocessor(batch)["inputs"], torch.stack([s["inputs"] for s in samples(pipeline=[])]))
    one_by_one = DataPreprocessor(views=TwoViews("v1", 8))(batch, training=True)["inputs"]
    assert [view.shape for view in one_by_one] == [(4, 1, 8, 8)] * 2


@pytest.mark.parametrize("variant", ["v2", "v3"])
def test_views_cut_out_in_the_workers_are_finished_by_the_preprocessor(variant):
    """Crops as bytes, the rest on the whole batch: the same views as those of a call, in two halves."""
    views = {"variant": variant, "image_size": 8}
    pipeline, whole = TwoViews(**views, finish=False), core.TwoViews(variant, 8)
    images = [torch.randint(0, 256, (3, 20 + n, 30), dtype=torch.uint8) for n in range(4)]
    torch.manual_seed(0)
    batch = pseudo_collate([pipeline({"img": image, "gt_label": n}) for n, image in enumerate(images)])
    torch.manual_seed(0)
    crops = [torch.stack(half) for half in zip(*(whole.crop(image) for image in images), strict=True)]
    assert all(view.dtype == torch.uint8 for half in batch["inputs"] for view in half)
    preprocessor = DataPreprocessor(views={"type": "moco_plugins.TwoViews", **views})
    torch.manual_seed(1)
    found = preprocessor(batch, training=True)["inputs"]
    torch.manual_seed(1)
    assert all(torch.equal(a, whole.finish(b, n)) for n, (a, b) in enumerate(zip(found, crops, strict=True)))
    assert labels_of(batch["data_samples"], 4)[0] == [0, 1, 2, 3]


def test_views_that_nobody_finishes_are_an_error():
    batch = pseudo_collate([TwoViews("v2", 8, finish=False)({"img": torch.rand(3, 20, 20)})])
    for preprocessor in (DataPreprocessor(), DataPreprocessor(views=lambda image: (image, image))):
        with pytest.raises(ValueError, match=r"only cut out.*finish=False.*views=dict\(type='moco_plugins.TwoViews'"):
            preprocessor(batch, training=True)
    with pytest.raises(ValueError, match=r"finish=False: the views 'affine'"):
        TwoViews("affine", 8, finish=False)


ONE_VIEW = torch.rand(4, 1, 8, 8)
WRONG = {
    "one view": ({"inputs": ONE_VIEW}, r"one view\. .*moco_plugins\.TwoViews"),
    "images and labels": ((ONE_VIEW, torch.zeros(4)), r"one view.*moco_plugins\.TwoViews"),
    "no inputs": ({"img": ONE_VIEW, "gt_label": 1}, r"dict with 'img', 'gt_label'.*PackInputs"),
    "nobody collated": ([{"inputs": ONE_VIEW}] * 4, r"list of 4 samples.*collate_fn"),
    "three views": ({"inputs": [ONE_VIEW] * 3}, r"3 parts.*two views"),
    "not tensors": ({"inputs": [np.zeros((8, 8))] * 4}, r"ndarray.*PackInputs"),
    "sizes differ": ({"inputs": [[torch.rand(1, 8, 8), torch.rand(1, 9, 8)]] * 2}, r"different shapes.*one size"),
    "nonsense": (7, r"the batch is a int"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_batch_says_what_to_add(kind):
    batch, text = WRONG[kind]
    from mmengine.optim import OptimWrapper

    net = model()
    with pytest.raises((TypeError, ValueError), match=text):
        net.train_step(batch, OptimWrapper(torch.optim.SGD(net.parameters(), 0.1)))


def test_wrong_batches_behind_mmengines_own_preprocessor():
    net = model(data_preprocessor={"type": "BaseDataPreprocessor"})
    with pytest.raises(TypeError, match=r"the batch has 'img'.*data_preprocessor=.*moco_plugins\.DataPreprocessor"):
        net.val_step({"img": ONE_VIEW})
    with pytest.raises(TypeError, match=r"3 parts \(list.*default_collate"):
        net._run_forward({"inputs": [[ONE_VIEW[0]] * 4] * 3}, mode="loss")
    loss = net._run_forward({"inputs": [[ONE_VIEW[0]] * 4] * 2}, mode="loss")["loss"]  # as it leaves two views
    assert torch.isfinite(loss)


# Metrics


def predictions(features, labels, splits):
    rows = zip(torch.as_tensor(features, dtype=torch.float), labels, splits, strict=True)
    return [{"features": f, "label": label, "split": split} for f, label, split in rows]


def score(kind, rows, **options):
    metric = METRICS.build({"type": f"moco_plugins.{kind}", **options})
    metric.process(None, rows)
    return metric.evaluate(len(rows))


def test_knn_uses_the_training_part_as_bank():
    features = [[1, 0], [0, 1], [1, 0.1], [0.1, 1], [1, 0.2]]
    rows = predictions(features, [0, 1, 0, 1, 1], ["train", "train", "test", "test", "test"])
    assert score("KNNMetric", rows, k=1) == {"knn/top1": pytest.approx(2 / 3)}


@pytest.mark.parametrize("split", ["", "test", "train"])
def test_without_parts_each_half_is_scored_against_the_other(split):
    centres = torch.eye(3).repeat(20, 1) + 0.05 * torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    labels = [0, 1, 2] * 20
    labels[0] = 1  # one wrong label: its own prediction is wrong
    assert score("KNNMetric", predictions(centres, labels, [split] * 60), k=3)["knn/top1"] == pytest.approx(59 / 60)


def test_linear_probe():
    pytest.importorskip("sklearn")
    torch.manual_seed(0)
    labels = torch.arange(400) % 4
    features = torch.randn(400, 8)
    features[torch.arange(400), labels] += 4
    state = torch.get_rng_state()
    rows = predictions(features, labels.tolist(), ["train"] * 300 + ["test"] * 100)
    assert score("LinearProbeMetric", rows)["linear/top1"] > 0.95
    assert torch.equal(state, torch.get_rng_state())


def test_metrics_say_what_is_missing():
    with pytest.raises(ValueError, match="no label"):
        score("KNNMetric", predictions([[1, 0]], [-1], ["test"]))
    with pytest.raises(TypeError, match="without 'features'"):
        score("KNNMetric", [{"pred_score": 1}])
