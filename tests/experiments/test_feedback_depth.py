"""What experiments/feedback_depth.py computes from logits and losses."""

import pathlib
import sys

import jax
import numpy as np
import pytest

from tests.ranks import draw

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "experiments"))

import feedback_depth


def test_divergence_is_that_of_the_whole_vocabulary():
    wanted, found = draw(0, 3, 5, 32), draw(1, 3, 5, 32)
    log = lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))  # noqa: E731
    left, right = log(np.float64(wanted)), log(np.float64(found))
    whole = (np.exp(left) * (left - right)).sum(-1).mean()
    # Four ranks, each with its part of the vocabulary.
    parts = [x.reshape(3, 5, 4, 8).transpose(2, 0, 1, 3) for x in (wanted, found)]
    ranked = jax.vmap(feedback_depth.divergence, axis_name=feedback_depth.AXIS)(*parts)
    np.testing.assert_allclose(ranked, whole, rtol=1e-5)


def test_a_gap_is_in_percent_of_the_mean_loss():
    value, spread = feedback_depth.gap([2.02, 4.04], [2.0, 4.0])
    assert value == pytest.approx(1.0)
    assert spread == pytest.approx(0.0, abs=1e-9)
    assert feedback_depth.gap([1.1], [1.0]) == (pytest.approx(10.0), 0.0)


def test_growth_compares_the_deepest_with_the_shallowest():
    found = {
        ("echo", 4): 2.0,
        ("echo", 64): 1.0,
        ("no-feedback", 4): 2.0,
        ("no-feedback", 64): 8.0,
    }
    assert dict(feedback_depth.growth(found)) == {"echo": 0.5, "no-feedback": 4.0}
