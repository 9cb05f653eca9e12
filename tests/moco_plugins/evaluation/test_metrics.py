"""Metrics beside accuracy, against scikit-learn's; fine-tuning."""

from __future__ import annotations

import copy

import pytest
import torch
from sklearn.metrics import average_precision_score, balanced_accuracy_score, confusion_matrix, roc_auc_score
from torch import nn

from moco_plugins.data.arrays import ImageArray
from moco_plugins.evaluation import balanced_accuracy, confusion, finetune, macro_auroc, mean_average_precision

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
