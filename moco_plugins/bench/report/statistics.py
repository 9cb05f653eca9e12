"""What a few seeds can tell: means with intervals, and paired differences. scipy does the work."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    """A method minus the reference, seed by seed: mean and Student's interval of the mean."""

    label: str
    reference: str
    count: int
    mean: float
    low: float
    high: float

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.count >= 2 and not self.low <= 0 <= self.high

    def sentence(self) -> str:
        """Say in words whether the data can tell the two apart."""
        if self.count < 2:
            return (
                f"{self.label} against {self.reference}: {_points(self.mean)} points in {_seeds(self.count)}, "
                "which may be chance."
            )
        interval = f"{_points(self.mean)} points, 95 % interval {_points(self.low)} to {_points(self.high)}"
        if not self.told_apart:
            return f"{_seeds(self.count).capitalize()} cannot tell {self.label} from {self.reference} ({interval})."
        which = "better" if self.mean > 0 else "worse"
        return f"{self.label} is {which} than {self.reference} ({interval}, {_seeds(self.count)})."


def _points(fraction: float) -> str:
    digits = 1 if abs(fraction) >= 0.0005 or fraction == 0 else 2  # the end of an interval next to zero keeps its sign
    return f"{100 * fraction:+.{digits}f}".replace("-", "−")


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
        return Difference(label, reference, len(seeds), average, average, average)
    from scipy.stats import ttest_1samp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nearly equal values lose precision; the interval stays right
        interval = ttest_1samp(differences, 0.0).confidence_interval(CONFIDENCE)
    return Difference(label, reference, len(seeds), average, float(interval.low), float(interval.high))
