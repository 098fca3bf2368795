"""Differences between two models that answered the same questions."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A mean with its standard error."""

    mean: float
    error: float  # standard error of the mean


def mean_of(values: Sequence[float] | np.ndarray) -> Estimate:
    """Mean of independent values; the error is NaN for a single one."""
    values = np.asarray(values, np.float64)
    spread = values.std(ddof=1) if len(values) > 1 else math.nan
    return Estimate(float(values.mean()), float(spread / math.sqrt(len(values))))


def paired_difference(found, wanted) -> Estimate:
    """Mean of ``found - wanted`` over the same questions, with its standard error.

    Most questions are answered alike by both, so that this error is far smaller than
    that of either mean.

    Args:
      found: scores of the questions under one plan.
      wanted: scores of the same questions, in the same order, under the other.
    """
    return mean_of(np.asarray(found, np.float64) - np.asarray(wanted, np.float64))


def average(estimates: Sequence[Estimate]) -> Estimate:
    """Mean over independent sets, each with the same weight, and its standard error."""
    error = math.sqrt(sum(estimate.error**2 for estimate in estimates))
    mean = sum(estimate.mean for estimate in estimates)
    return Estimate(mean / len(estimates), error / len(estimates))
