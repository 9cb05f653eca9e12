"""Is this loss normal? The words that a look at a training gets."""

from __future__ import annotations

import math

import pytest

from moco_plugins.bench.report.health import in_words, loss_in_words

K = math.log(4097)


@pytest.mark.parametrize(
    ("loss", "filled", "expected"),
    [
        (3.0, 0.2, "still fills (20 %)"),  # random keys are easy: the loss rises while real ones replace them
        (4.0, 1.0, "below guessing, so it learns: normal"),
        (K, 1.0, "as good as guessing; normal in the first epochs, not at the end"),
        (1.2 * K, 1.0, "worse than guessing"),
        (math.nan, 1.0, "has failed"),
    ],
)
def test_a_loss_is_read_beside_that_of_guessing(loss: float, filled: float, expected: str) -> None:
    said = loss_in_words(loss, K, filled)
    assert expected in said
    assert "ln(K + 1) = 8.32" in said


def test_a_loss_without_a_reference_is_only_told() -> None:
    assert in_words({"loss": -0.93, "metric_loss_reference": None}) == ["loss -0.930"]


def test_drift_collapse_and_the_right_key_are_said() -> None:
    good = {
        "loss": 4.0,
        "metric_loss_reference": K,
        "metric_contrastive_top1": 0.41,
        "metric_key_drift": 0.01,
        "metric_feature_std": 0.08,
        "metric_feature_std_reference": 0.09,
    }
    said = " ".join(in_words(good))
    for words in (
        "for 41 % of the images (by chance 0.024 %)",
        "keys are fresh (drift 0.01)",
        "spread (89 % of an even",
    ):
        assert words in said
    bad = " ".join(in_words({**good, "metric_key_drift": 0.4, "metric_feature_std": 0.001}))
    assert "stale: try a momentum nearer to 1" in bad
    assert "have collapsed (1 % of an even spread)" in bad
