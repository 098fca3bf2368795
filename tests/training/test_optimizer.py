import numpy as np
import pytest

from echo_jax.training import OptimizerConfig, make_schedule

RATE = 1e-2


def rates(steps=100, **kwargs):
    schedule = make_schedule(OptimizerConfig(learning_rate=RATE, **kwargs), steps)
    return np.array([float(schedule(step)) for step in range(steps + 1)])


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_a_rate_rises_to_its_height_and_falls_to_its_end(schedule):
    found = rates(schedule=schedule, warmup=0.1, final=0.2)
    assert found[0] == pytest.approx(RATE / 10)
    assert (np.diff(found[:11]) > 0).all()
    assert found.max() == pytest.approx(RATE)
    assert found[10] == pytest.approx(RATE)
    assert found[-1] == pytest.approx(0.2 * RATE)
    assert (np.diff(found[10:]) <= 1e-6 * RATE).all()  # up to rounding


def test_wsd_stays_and_then_falls_evenly():
    found = rates(schedule="wsd", warmup=0.1, decay=0.3, final=0.0)
    np.testing.assert_allclose(found[10:70], RATE, rtol=1e-6)
    np.testing.assert_allclose(np.diff(found[70:]), -RATE / 30, rtol=1e-3)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_few_steps_have_rates_too(steps):
    for schedule in ("cosine", "wsd"):
        found = rates(steps, schedule=schedule)
        assert (found > 0).all()
        assert found.max() <= RATE * (1 + 1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "linear"}, "schedule='linear'"),
        ({"decay": 0.95}, "decay=0.95"),
        ({"decay": -0.1}, "decay=-0.1"),
        ({"accumulate": 0}, "accumulate=0"),
    ],
)
@pytest.mark.usefixtures("as_shipped")
def test_settings_that_make_no_sense(changes, words):
    with pytest.raises(ValueError, match=words):
        OptimizerConfig(**changes)
