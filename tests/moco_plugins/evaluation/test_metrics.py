"""Metrics beside accuracy, against scikit-learn's; fine-tuning."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, balanced_accuracy_score, confusion_matrix, roc_auc_score
from torch import nn

from moco_plugins.data.arrays import ImageArray
from moco_plugins.evaluation import (
    average_precisions,
    balanced_accuracy,
    confusion,
    few_labels,
    finetune,
    knn_mean_average_precision,
    macro_auroc,
    mean_average_precision,
    probe,
)

probes: Any = sys.modules["moco_plugins.evaluation.probe"]  # the package has a function of this name
SCORES = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
LABELS = torch.randint(0, 4, (200,), generator=torch.Generator().manual_seed(2))


def test_confusion_and_balanced_accuracy() -> None:
    labels = torch.where(LABELS == 3, 0, LABELS)
    predicted = SCORES.argmax(1)
    counts = confusion(predicted, labels, 4)
    assert counts.tolist() == confusion_matrix(labels, predicted, labels=range(4)).tolist()
    with pytest.warns(UserWarning, match="not in y_true"):
        assert balanced_accuracy(counts) == pytest.approx(balanced_accuracy_score(labels, predicted))
    assert int(confusion(predicted, torch.full((200,), -1), 4).sum()) == 0


def test_macro_auroc() -> None:
    probabilities = SCORES.double().softmax(1)
    expected = roc_auc_score(LABELS, probabilities, multi_class="ovr", average="macro")
    assert macro_auroc(probabilities, LABELS) == pytest.approx(expected)
    with pytest.raises(ValueError, match="needs two"):
        macro_auroc(SCORES, torch.zeros(200, dtype=torch.long))


def test_mean_average_precision_of_several_labels() -> None:
    labels = (torch.rand(200, 4, generator=torch.Generator().manual_seed(3)) < 0.3).long()
    assert mean_average_precision(SCORES, labels) == pytest.approx(average_precision_score(labels, SCORES))
    labels[:, 2] = 0
    rest = [0, 1, 3]
    expected = average_precision_score(labels[:, rest], SCORES[:, rest])
    assert mean_average_precision(SCORES, labels) == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"\(M, classes\)"):
        mean_average_precision(SCORES, LABELS)


def test_average_precision_of_each_class_is_none_where_it_has_no_image() -> None:
    labels = (torch.rand(200, 4, generator=torch.Generator().manual_seed(3)) < 0.3).long()
    labels[:, 2] = 0
    found = average_precisions(SCORES, labels)
    assert found[2] is None
    assert found[3] == pytest.approx(average_precision_score(labels[:, 3], SCORES[:, 3]))


def test_macro_auroc_of_several_labels_leaves_out_classes_that_all_images_have_or_none() -> None:
    labels = (torch.rand(200, 4, generator=torch.Generator().manual_seed(3)) < 0.3).long()
    assert macro_auroc(SCORES, labels) == pytest.approx(roc_auc_score(labels, SCORES, average="macro"))
    labels[:, 0], labels[:, 1] = 1, 0
    assert macro_auroc(SCORES, labels) == pytest.approx(roc_auc_score(labels[:, 2:], SCORES[:, 2:], average="macro"))


def several(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    features = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return features, (features[:, :3] + 0.5 * features[:, 3:] > 0.4).long()


def test_knn_of_several_labels_scores_a_class_by_its_part_of_the_votes() -> None:
    (bank, known), (queries, truth) = several(80, 1), several(40, 2)
    scores = torch.zeros(40, 3)
    for row, query in enumerate(queries):
        cosine = torch.cosine_similarity(bank, query[None])
        near = cosine.topk(7).indices
        weights = (cosine[near] / 0.1).exp()
        scores[row] = (weights[:, None] * known[near]).sum(0) / weights.sum()
    expected = average_precision_score(truth, scores)
    assert knn_mean_average_precision(bank, known, queries, truth, k=7) == pytest.approx(expected, abs=1e-5)


def test_the_probe_of_several_labels_is_a_binary_regression_of_each_class_by_itself() -> None:
    (x, y), (test_x, test_y) = several(150, 1), several(60, 2)
    found = probe(x, y, test_x, test_y, strengths=(10.0,))
    mean, scale = x.mean(0), x.std(0)
    for number in range(3):
        plain = LogisticRegression(C=10.0 / 150, tol=1e-8, max_iter=1000).fit((x - mean) / scale, y[:, number])
        expected = plain.decision_function((test_x - mean) / scale)
        assert found.logits[:, number].tolist() == pytest.approx(expected.tolist(), abs=2e-2)
    assert found.score == mean_average_precision(found.logits, test_y)


def test_a_class_that_all_images_of_several_labels_have_tells_nothing() -> None:
    (x, y), (test_x, test_y) = several(150, 1), several(60, 2)
    alone = probe(x, y, test_x, test_y).logits
    everywhere = torch.cat([y, torch.ones(150, 1, dtype=torch.long)], 1)
    found = probe(x, everywhere, test_x, torch.cat([test_y, torch.ones(60, 1, dtype=torch.long)], 1))
    assert not found.logits[:, 3].any()
    assert found.logits[:, :3].tolist() == alone.tolist()
    with pytest.raises(ValueError, match="no class with images in it and not in it"):
        probe(x, torch.ones_like(y), test_x, test_y)


def test_few_of_several_labels_have_two_images_of_each_class() -> None:
    labels = torch.zeros(300, 3, dtype=torch.long)
    labels[:150, 0], labels[[7, 90, 200], 1] = 1, 1
    rows = few_labels(labels, 0.01, seed=1)
    assert labels[rows].sum(0).tolist()[:2] >= [2, 2]
    assert len(few_labels(labels, 0.1, seed=1)) == 30


def test_the_probe_chooses_its_strength_with_whole_groups_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, y), (test_x, test_y) = several(90, 1), several(30, 2)
    groups = torch.arange(90) // 3
    cuts: list[tuple[torch.Tensor, torch.Tensor]] = []
    whole = probes.grouped_split

    def kept(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        cuts.append(whole(*arguments))
        return cuts[-1]

    monkeypatch.setattr(probes, "grouped_split", kept)
    probe(x, y, test_x, test_y, groups=groups)
    probe(x, y[:, 0].contiguous(), test_x, test_y[:, 0].contiguous(), groups=groups)
    assert len(cuts) == 2
    for learnt, held in cuts:
        assert len(held)
        assert not set(groups[learnt].tolist()) & set(groups[held].tolist())


def bright_and_dark(count: int) -> ImageArray:
    labels = torch.arange(count) % 2
    pixels = torch.randint(0, 100, (count, 1, 4, 4), generator=torch.Generator().manual_seed(count))
    return ImageArray((pixels + 100 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels * 5)


def test_finetuning_learns_in_a_copy() -> None:
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())
    before, random_before = copy.deepcopy(backbone.state_dict()), torch.get_rng_state()
    train, test = bright_and_dark(100), bright_and_dark(40)
    train.labels[:10] = -1  # type: ignore[index]
    found = finetune(backbone, 8, train, test, epochs=8, batch_size=16, learning_rate=0.02)
    assert found.accuracy > 0.95
    assert found.classes.tolist() == [0, 5]
    assert found.accuracy == finetune(backbone, 8, train, test, epochs=8, batch_size=16, learning_rate=0.02).accuracy
    assert all(torch.equal(value, backbone.state_dict()[name]) for name, value in before.items())
    assert torch.equal(random_before, torch.get_rng_state())
    train.labels[:] = 0  # type: ignore[index]
    with pytest.raises(ValueError, match="needs two"):
        finetune(backbone, 8, train, test)


def test_finetuning_learns_several_labels() -> None:
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())
    train, test = bright_and_dark(100), bright_and_dark(40)
    for part in (train, test):
        own = part.labels // 5
        part.labels = torch.stack([own, 1 - own], 1)
    train.labels[:10] = -1  # type: ignore[index]
    found = finetune(backbone, 8, train, test, epochs=8, batch_size=16, learning_rate=0.02)
    assert found.labels.shape == (40, 2)
    assert found.score > 0.95
