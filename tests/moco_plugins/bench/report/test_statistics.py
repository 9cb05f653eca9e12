from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from moco_plugins.bench.report.comparison import differences, engines_agree, unequal_budgets
from moco_plugins.bench.report.statistics import Difference, holm, paired, seeds_needed, summarise
from moco_plugins.bench.report.table import rows


def test_summary_of_one_and_none() -> None:
    assert summarise([0.9]).mean == 0.9
    assert math.isnan(summarise([0.9]).low)
    assert math.isnan(summarise([]).mean)
    assert summarise([0.5, 0.5, 0.5]) == summarise([0.5, 0.5, 0.5])
    assert (summarise([0.5, 0.5]).low, summarise([0.5, 0.5]).high) == (0.5, 0.5)


def test_bootstrap_interval_has_the_coverage_it_claims() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(100):
        found = summarise(generator.normal(0.9, 0.01, size=20).tolist())
        assert found.low < found.mean < found.high
        hits += found.low <= 0.9 <= found.high
    assert hits >= 85  # a percentile bootstrap of 20 values covers about 93 %


def test_paired_difference_is_students() -> None:
    a = {0: 0.95, 1: 0.94, 2: 0.96, 3: 0.93}
    b = {0: 0.90, 1: 0.91, 2: 0.92, 3: 0.90}
    found = paired("a", a, "b", b)
    reference = stats.ttest_rel(list(a.values()), list(b.values())).confidence_interval(0.95)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((reference.low, reference.high))
    assert found.told_apart
    assert found.sentence().startswith("a is better than b (+3.7 points, 95 % interval ")


def test_pairs_by_seed_and_says_when_it_cannot_tell() -> None:
    found = paired("a", {0: 0.95, 1: 0.90, 7: 0.1}, "b", {1: 0.91, 0: 0.93, 9: 0.2})
    assert found is not None
    assert found.count == 2
    assert found.mean == pytest.approx(0.005)
    assert not found.told_apart
    assert found.sentence().startswith("Two seeds cannot tell a from b (+0.5 points")
    one = paired("a", {0: 0.9}, "b", {0: 0.8})
    assert one is not None
    assert "in one seed, which may be chance" in one.sentence()
    assert not one.told_apart
    assert paired("a", {0: 0.9}, "b", {1: 0.8}) is None


def _run(label: str, seed: int, knn: float, engine: str = "lightning", **more: object) -> dict[str, object]:
    losses = [[step, 1 / step + knn] for step in range(1, 5)]
    record = {"method": label, "label": label, "seed": seed, "engine": engine, "status": "finished", "knn_top1": knn}
    return {**record, "losses": losses, "epochs": 4, "images_seen": 100, "seconds": 10.0, **more}


def test_differences_are_against_the_reference() -> None:
    runs = [
        _run("moco-v2", 0, 0.9),
        _run("moco-v2", 1, 0.92),
        _run("x", 0, 0.95),
        _run("x", 1, 0.96),
        _run("x", 2, 0.1),
    ]
    table = rows({"runs": runs, "baselines": []})
    (found,) = differences(table, "knn_top1", None)
    assert (found.label, found.reference, found.count) == ("x", "moco-v2", 2)
    assert differences(table, "knn_top1", "x")[0].mean == pytest.approx(-0.045)
    with pytest.raises(ValueError, match=r"--reference 'y': the results have .*moco-v2"):
        differences(table, "knn_top1", "y")


def test_engines_are_compared_step_by_step() -> None:
    same = [_run("a", 0, 0.9), _run("a", 0, 0.9, engine="mmengine")]
    (sentence,) = engines_agree({"runs": same})
    assert "lightning and mmengine give exactly the same loss at each of 4 steps" in sentence
    other = _run("a", 0, 0.9, engine="mmengine")
    other["losses"][2][1] += 1e-3  # type: ignore[index]
    (sentence,) = engines_agree({"runs": [same[0], other]})
    assert "part at step 3 of 4" in sentence
    assert engines_agree({"runs": same[:1]}) == []


def test_engines_that_agree_share_a_sentence_and_others_have_their_own() -> None:
    engines = ("lightning", "mmengine", "accelerate")
    runs = [_run("a", seed, 0.9, engine=engine) for engine in engines for seed in (0, 1)]
    (sentence,) = engines_agree({"runs": runs})
    assert sentence == (
        "a, seeds 0 and 1: lightning, mmengine and accelerate give exactly the same loss at each of 4 steps and the same kNN "
        "accuracy."
    )
    runs[2]["losses"][1][1] += 2e-6  # type: ignore[index]
    runs[5]["knn_top1"] = 0.8
    assert [sentence.partition(": ")[2] for sentence in engines_agree({"runs": runs})] == [
        "lightning, mmengine and accelerate give the same loss at each of 4 steps (largest difference 2e-06) and the same kNN "
        "accuracy.",
        "lightning and mmengine give exactly the same loss at each of 4 steps and the same kNN accuracy.",
        "lightning and accelerate give exactly the same loss at each of 4 steps and kNN accuracies 0.9 and 0.8.",
    ]


def test_unequal_budgets_are_said() -> None:
    runs = [_run("a", 0, 0.9), _run("b", 0, 0.9, epochs=8)]
    sentence = unequal_budgets({"runs": runs, "baselines": [], "settings": {}})
    assert sentence is not None
    assert "b had 2.00 times the epochs of a" in sentence
    assert unequal_budgets({"runs": runs, "baselines": [], "settings": {"budget": "images=100"}}) is None


def test_holm_corrects_for_the_number_of_comparisons() -> None:
    ps = (0.01, 0.04, 0.03, 0.005)  # of Holm 1979: 4 x 0.005, 3 x 0.01, 2 x 0.03, then no less than that
    tests = [Difference(str(p), "r", 5, 0.1, 0.01, 0.2, 0.1, p, p) for p in ps]
    single = Difference("one", "r", 1, 0.1, -math.inf, math.inf)
    found = holm([*tests, single])
    assert [one.corrected for one in found[:4]] == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert [one.told_apart for one in found] == [True, False, False, True, False]
    assert "p = 0.03 corrected for 4 comparisons" in found[0].sentence()
    assert holm(tests[1:2])[0].corrected == 0.04  # alone there is nothing to correct
    assert holm(tests[1:2])[0].told_apart


def test_p_is_that_of_the_paired_t_test_and_effect_that_of_hedges() -> None:
    a, b = {0: 0.95, 1: 0.94, 2: 0.96, 3: 0.93}, {0: 0.90, 1: 0.91, 2: 0.92, 3: 0.90}
    found = paired("a", a, "b", b)
    assert found is not None
    assert found.p == pytest.approx(stats.ttest_rel(list(a.values()), list(b.values())).pvalue)
    assert found.effect == pytest.approx(0.0375 / 0.009574 * (1 - 3 / 11), rel=1e-3)


@pytest.mark.parametrize(("effect", "seeds"), [(0.5, 34), (0.8, 15), (1.0, 10)])
def test_seeds_needed_are_those_of_the_tables_of_power(effect: float, seeds: int) -> None:
    assert seeds_needed(effect, 1.0) == seeds  # Cohen 1988 and G*Power: paired, two-sided, alpha 0.05, power 0.8
    assert seeds_needed(-effect * 0.01, 0.01) == seeds


def test_seeds_needed_where_there_is_no_answer() -> None:
    assert seeds_needed(0.0, 1.0) is None
    assert seeds_needed(0.1, 0.0) is None
    assert seeds_needed(0.001, 1.0) is None
