"""A fit finds the figures that the times were made from."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings

from echo_jax import benchmark
from echo_jax.cost_model import ExactSpeed, Sample, calibrate, fit, predict
from echo_jax.models.timing import Times
from tests.cost_model.models import LAN, models
from tests.ranks import mesh

SIZES = [1 << n for n in (14, 18, 21, 24)]
PIECES = (None, 1, 2, 8)
# What one link of unknown rate shows: adding and stall count as something else.
PLAIN = dataclasses.replace(
    LAN,
    exact=ExactSpeed(),
    link=dataclasses.replace(LAN.link, efficiency=1.0, stall=0.0),
)


def made(model, *, rates=(None,), noise=0.0, seed=0):
    """Samples of a model's own times."""
    draw = np.random.default_rng(seed)
    samples = []
    for size, pieces, rate in itertools.product(SIZES, PIECES, rates):
        here = Sample(
            message_bytes=size, seconds=1.0, num_chunks=pieces, bytes_per_second=rate
        )
        factor = math.exp(noise * draw.standard_normal())
        seconds = factor * predict(model, here)
        samples.append(dataclasses.replace(here, seconds=seconds))
    return samples


@pytest.mark.parametrize(("burst", "at_once"), [(0, False), (256_000, True)])
def test_a_fit_recovers_every_figure_but_those_which_it_is_told(burst, at_once):
    rates = (math.inf, 5e7, 1.25e7)
    link = dataclasses.replace(LAN.link, burst_bytes=burst, at_once=at_once)
    model = dataclasses.replace(LAN, link=link)
    told = {"burst_bytes": burst, "at_once": at_once}
    found = fit(made(model, rates=rates), 4, dtype="float16", **told)
    assert found.link.bytes_per_second == math.inf
    for part in ("link", "exact", "codec"):
        for field, wanted in dataclasses.asdict(getattr(model, part)).items():
            if field != "bytes_per_second":
                value = getattr(getattr(found, part), field)
                assert value == pytest.approx(wanted, rel=1e-3), field


def test_one_rate_does_not_tell_adding_from_sending():
    found = fit(made(LAN, rates=(5e7,)), 4, dtype="float16")
    assert found.exact.overlap == 0
    for size in SIZES:
        assert found.exact_seconds(size) == pytest.approx(
            LAN.exact_seconds(size), rel=1e-3
        )


def test_of_a_link_of_unknown_rate_it_finds_the_bandwidth():
    found = fit(made(PLAIN), 4, dtype="float16")
    assert found.link.bytes_per_second == pytest.approx(5e7, rel=1e-6)
    assert found.link.latency_seconds == pytest.approx(1e-4, rel=1e-6)
    for field, value in dataclasses.asdict(LAN.codec).items():
        assert getattr(found.codec, field) == pytest.approx(value, rel=1e-3), field


@settings(max_examples=10)
@given(models())
def test_a_fit_predicts_the_times_of_any_model(model):
    """Also where several sets of figures would do.

    Bursts and overlaps of adding bend the times: they are for links of known rates.
    """
    ring = dataclasses.replace(
        model,
        link=dataclasses.replace(model.link, burst_bytes=0),
        exact=dataclasses.replace(model.exact, tree=False, overlap=0.0),
    )
    samples, told = made(ring), {"dtype": ring.dtype, "config": ring.config}
    found = fit(samples, ring.ranks, **told, at_once=ring.link.at_once)
    errors = [abs(predict(found, s) / s.seconds - 1) for s in samples]
    assert np.median(errors) < 0.05


def test_noise_of_a_tenth_and_an_outlier_do_little():
    samples = made(LAN, rates=(math.inf, 5e7), noise=0.1)
    samples[-1] = dataclasses.replace(samples[-1], seconds=5 * samples[-1].seconds)
    found = fit(samples, 4, dtype="float16")
    clean = made(LAN, rates=(math.inf, 2.5e7, 1e8))
    errors = [abs(predict(found, s) / s.seconds - 1) for s in clean]
    assert np.median(errors) < 0.1


def test_exact_sums_that_are_slow_by_themselves_do_not_slow_the_link_down():
    """As gloo's of float16 are, on a link that is not limited."""
    wanted = dataclasses.replace(
        PLAIN,
        exact=ExactSpeed(byte_seconds=3e-9),
        codec=dataclasses.replace(LAN.codec, value_seconds=0.0, overlap=0.0),
    )
    found = fit(made(wanted), 4, dtype="float16")
    assert found.exact.byte_seconds == pytest.approx(3e-9, rel=1e-3)
    assert found.link.bytes_per_second == pytest.approx(5e7, rel=1e-3)


def test_no_figure_is_negative_and_no_link_faster_than_it_is():
    """Times that no model gives: large messages quicker than small ones."""
    samples = [
        Sample(message_bytes=size, seconds=1.0 / size, num_chunks=n, bytes_per_second=r)
        for size in SIZES
        for n in (None, 1, 4)
        for r in (1e7, 1e8)
    ]
    unrated = [dataclasses.replace(s, bytes_per_second=None) for s in samples]
    for found in (fit(samples, 2), fit(unrated, 2)):
        assert found.link.latency_seconds >= 0
        assert 0 < found.link.efficiency <= 1
        assert found.exact.byte_seconds >= 0
        assert found.codec.piece_seconds >= 0
        assert found.codec.value_seconds >= 0


@pytest.mark.parametrize("rates", [(None,), (math.inf, 5e7)])
def test_without_pieces_nothing_is_said_to_overlap_or_stall(rates):
    samples = [s for s in made(LAN, rates=rates) if s.num_chunks in (None, 1)]
    found = fit(samples, 4, dtype="float16")
    assert found.codec.overlap == 0
    assert found.link.stall == 0


def test_a_mesh_is_calibrated_by_the_times_of_its_sums(monkeypatch):
    """The times come from ``benchmark.time_cases``; here they are made up."""
    at_once = dataclasses.replace(PLAIN.link, at_once=True)  # as on CPUs
    wanted = dataclasses.replace(PLAIN, link=at_once)

    def times(cases, mesh, shape, *, length, repetitions):
        assert mesh.size == 4
        size = 2 * math.prod(shape)
        seconds = {
            case.name: wanted.exact_seconds(size)
            if case.config is None
            else wanted.echo_seconds(size, case.config.num_chunks)
            for case in cases
        }
        assert all(c.config is None or c.config.min_bytes == 0 for c in cases)
        return {name: Times.of([value]) for name, value in seconds.items()}

    monkeypatch.setattr(benchmark, "time_cases", times)
    found = calibrate(mesh(tp=4), dtype="float16")
    assert found.ranks == 4
    assert found.exact_seconds(1 << 26) == pytest.approx(wanted.exact_seconds(1 << 26))
    for pieces in (1, 4):
        assert found.echo_seconds(1 << 26, pieces) == pytest.approx(
            wanted.echo_seconds(1 << 26, pieces), rel=1e-3
        )


def test_a_mesh_is_really_measured():
    found = calibrate(mesh(tp=2), sizes=(1 << 12, 1 << 14), chunks=(1,), repetitions=1)
    assert found.exact_seconds(1 << 14) > 0
    assert found.echo_seconds(1 << 14) > 0


def test_what_cannot_be_fitted_says_why():
    samples = made(LAN)
    with pytest.raises(ValueError, match="1 sizes of echo sums"):
        fit([s for s in samples if not s.num_chunks or s.message_bytes == 1 << 21], 4)
    with pytest.raises(ValueError, match="0 sizes of exact sums"):
        fit([s for s in samples if s.num_chunks], 4)
    with pytest.raises(ValueError, match="ranks=1 send nothing"):
        fit(samples, 1)
    with pytest.raises(ValueError, match="known for 16 of 32 samples"):
        fit(samples + made(LAN, rates=(1e8,)), 4)
    with pytest.raises(ValueError, match=r"burst_bytes=1000 belong to links"):
        fit(samples, 4, burst_bytes=1000)
    with pytest.raises(ValueError, match=r"seconds=0\.0 must be above 0"):
        Sample(message_bytes=1, seconds=0.0)
    for name, wrong in (
        ("message_bytes", 0),
        ("num_chunks", 0),
        ("bytes_per_second", 0.0),
    ):
        with pytest.raises(ValueError, match=f"{name}={wrong} must be above 0"):
            Sample(**{"message_bytes": 1, "seconds": 1.0, name: wrong})
    with pytest.raises(ValueError, match="1 rank sends nothing"):
        calibrate(mesh(tp=1))
