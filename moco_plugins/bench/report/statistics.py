"""What a few seeds can tell: means with intervals, and paired differences. scipy does the work."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

#: Of all intervals.
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation and a bootstrap interval of the mean; nan where there are too few values."""

    count: int
    mean: float
    deviation: float
    low: float
    high: float


def summarise(values: Sequence[float]) -> Summary:
    """Summarise the values of several seeds; the interval is a percentile bootstrap of the mean with a fixed seed."""
    if not values:
        return Summary(0, math.nan, math.nan, math.nan, math.nan)
    numbers = np.asarray(values, dtype=float)
    average = float(numbers.mean())
    if len(numbers) < 2:
        return Summary(1, average, math.nan, math.nan, math.nan)
    deviation = float(numbers.std(ddof=1))
    if deviation == 0:
        return Summary(len(numbers), average, 0.0, average, average)
    from scipy.stats import bootstrap

    found = bootstrap(
        (numbers,),
        np.mean,
        n_resamples=9999,
        confidence_level=CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return Summary(len(numbers), average, deviation, float(found.low), float(found.high))


@dataclass(frozen=True)
class Difference:
    """A method minus the reference, seed by seed: mean and Student's interval of the mean.

    ``p`` is that of the paired t test, and ``corrected`` the same after Holm's correction for all ``comparisons`` that were
    made with the reference; ``effect`` is the standardised mean difference with Hedges' correction for few seeds;
    ``deviation`` is that of the differences. What takes two seeds is nan with one.
    """

    label: str
    reference: str
    count: int
    mean: float
    low: float
    high: float
    deviation: float = math.nan
    p: float = math.nan
    corrected: float = math.nan
    comparisons: int = 1

    @property
    def told_apart(self) -> bool:
        """Whether zero is left out by the interval, or among several comparisons by Holm's procedure."""
        if self.count < 2:
            return False
        if self.comparisons > 1:
            return self.corrected < 1 - CONFIDENCE
        return not self.low <= 0 <= self.high

    @property
    def effect(self) -> float:
        """Mean over deviation of the differences (Cohen's d_z), times Hedges' 1 - 3 / (4 (n - 1) - 1); nan without spread."""
        if self.count < 2 or not self.deviation > 0:
            return math.nan
        return self.mean / self.deviation * (1 - 3 / (4 * (self.count - 1) - 1))

    @property
    def seeds_needed(self) -> int | None:
        """See :func:`seeds_needed`; None where the spread is not known or nothing would do."""
        return seeds_needed(self.mean, self.deviation) if self.count >= 2 else None

    def sentence(self) -> str:
        """Say in words whether the data can tell the two apart."""
        if self.count < 2:
            return (
                f"{self.label} against {self.reference}: {_points(self.mean)} points in {_seeds(self.count)}, "
                "which may be chance."
            )
        interval = f"{_points(self.mean)} points, 95 % interval {_points(self.low)} to {_points(self.high)}"
        if self.comparisons > 1:
            interval += f", p {_p(self.corrected)} corrected for {self.comparisons} comparisons"
        if not self.told_apart:
            needed = self.seeds_needed
            more = f" A difference of this size and spread takes about {needed} seeds." if needed else ""
            return (
                f"{_seeds(self.count).capitalize()} cannot tell {self.label} from {self.reference} ({interval}).{more}"
            )
        which = "better" if self.mean > 0 else "worse"
        return f"{self.label} is {which} than {self.reference} ({interval}, {_seeds(self.count)})."


def _points(fraction: float) -> str:
    digits = 1 if abs(fraction) >= 0.0005 or fraction == 0 else 2  # the end of an interval next to zero keeps its sign
    return f"{100 * fraction:+.{digits}f}".replace("-", "−")


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.2g}"


def _seeds(count: int) -> str:
    words = {1: "one seed", 2: "two seeds", 3: "three seeds"}
    return words.get(count, f"{count} seeds")


def paired(
    label: str, values: Mapping[int, float], reference: str, reference_values: Mapping[int, float]
) -> Difference | None:
    """Compare two methods on the seeds that both have: seed -> value; None if there is none.

    Seeds share split, order, views and initial weights, so differences are taken seed by seed. With so few of them a
    bootstrap interval is too narrow; Student's is not.
    """
    seeds = sorted(values.keys() & reference_values.keys())
    if not seeds:
        return None
    differences = np.array([values[seed] - reference_values[seed] for seed in seeds])
    average = float(differences.mean())
    if len(seeds) < 2:
        return Difference(label, reference, len(seeds), average, -math.inf, math.inf)
    if float(np.ptp(differences)) == 0:
        p = float(average == 0)
        return Difference(label, reference, len(seeds), average, average, average, 0.0, p, p)
    from scipy.stats import ttest_1samp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nearly equal values lose precision; the interval stays right
        test = ttest_1samp(differences, 0.0)
        interval = test.confidence_interval(CONFIDENCE)
    low, high, p = float(interval.low), float(interval.high), float(test.pvalue)
    return Difference(label, reference, len(seeds), average, low, high, float(differences.std(ddof=1)), p, p)


def holm(differences: Sequence[Difference]) -> list[Difference]:
    """The differences with their p corrected for there being several (Holm 1979): the k-th smallest of m times m - k + 1.

    Together they then go wrong no more often than one alone; differences of one seed are no tests and do not count.
    """
    tests = sorted((i for i, one in enumerate(differences) if one.count >= 2), key=lambda i: differences[i].p)
    found, worst = list(differences), 0.0
    for rank, i in enumerate(tests):
        worst = max(worst, min(1.0, (len(tests) - rank) * differences[i].p))
        found[i] = replace(differences[i], corrected=worst, comparisons=len(tests))
    return found


def seeds_needed(mean: float, deviation: float, power: float = 0.8, most: int = 1000) -> int | None:
    """The fewest seeds with which a paired t test would find such a difference, with 80 % chance at the 5 % level.

    Args:
        mean: of the differences.
        deviation: of the differences, over seeds.
        power: how often the test is to find it.
        most: None is returned where more are needed.
    """
    if not deviation > 0 or mean == 0:
        return None
    from scipy.stats import nct, t

    def finds(seeds: int) -> bool:
        bar = t.ppf(1 - (1 - CONFIDENCE) / 2, seeds - 1)
        return bool(nct.sf(bar, seeds - 1, abs(mean) / deviation * math.sqrt(seeds)) >= power)

    if not finds(most):
        return None
    low, high = 1, most  # one seed has no spread
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if finds(middle) else (middle, high)
    return high
