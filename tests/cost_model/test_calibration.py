"""A fit finds the figures that the times were made from."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings

from echo_jax import benchmark
from echo_jax.cost_model import Sample, calibrate, fit
from echo_jax.cost_model.calibration import predict
from echo_jax.models.timing import Times
from tests.cost_model.models import LAN, models
from tests.ranks import mesh

SIZES = [1 << n for n in (14, 18, 20, 22, 24)]
PIECES = (None, 1, 2, 4, 8)


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


def test_a_fit_recovers_every_coefficient():
    rates = (math.inf, 5e7, 1.25e7)
    found = fit(made(LAN, rates=rates), 4, dtype="float16")
    assert found.link.bytes_per_second == math.inf
    for part in ("link", "exact", "codec"):
        for field, wanted in dataclasses.asdict(getattr(LAN, part)).items():
            if field != "bytes_per_second":
                value = getattr(getattr(found, part), field)
                assert value == pytest.approx(wanted, rel=1e-3), field


def test_of_a_link_of_unknown_rate_it_finds_the_bandwidth():
    wanted = dataclasses.replace(
        LAN,
        exact=dataclasses.replace(LAN.exact, byte_seconds=0.0),
        link=dataclasses.replace(LAN.link, efficiency=1.0, stall=0.0),
    )
    found = fit(made(wanted), 4, dtype="float16")
    assert found.link.bytes_per_second == pytest.approx(5e7, rel=1e-6)
    assert found.link.latency_seconds == pytest.approx(1e-4, rel=1e-6)
    for field, value in dataclasses.asdict(LAN.codec).items():
        assert getattr(found.codec, field) == pytest.approx(value, rel=1e-3), field


@settings(max_examples=10)
@given(models())
def test_a_fit_predicts_the_times_of_any_model(model):
    """Also where several sets of coefficients would do."""
    ring = dataclasses.replace(
        model, exact=dataclasses.replace(model.exact, tree=False)
    )
    samples = made(ring)
    found = fit(samples, ring.ranks, dtype=ring.dtype, config=ring.config)
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
    link = dataclasses.replace(LAN.link, efficiency=1.0, stall=0.0)
    codec = dataclasses.replace(LAN.codec, value_seconds=0.0, overlap=0.0)
    wanted = dataclasses.replace(LAN, link=link, codec=codec)
    found = fit(made(wanted), 4, dtype="float16")
    assert found.exact.byte_seconds == pytest.approx(3e-9, rel=1e-3)
    assert found.link.bytes_per_second == pytest.approx(5e7, rel=1e-3)


def test_no_coefficient_is_negative_and_no_link_faster_than_it_is():
    """Times that no model gives: large messages quicker than small ones."""
    samples = [
        Sample(message_bytes=size, seconds=1.0 / size, num_chunks=n, bytes_per_second=r)
        for size in SIZES
        for n in (None, 1, 4)
        for r in (1e7, 1e8)
    ]
    found = fit(samples, 2)
    assert found.link.latency_seconds >= 0
    assert 0 < found.link.efficiency <= 1
    assert found.codec.piece_seconds >= 0
    assert found.codec.value_seconds >= 0


def test_without_pieces_nothing_is_said_to_overlap():
    samples = [s for s in made(LAN) if s.num_chunks in (None, 1)]
    found = fit(samples, 4, dtype="float16")
    assert found.codec.overlap < 1e-9
    assert found.link.stall < 1e-9


def test_a_mesh_is_calibrated_by_the_times_of_its_sums(monkeypatch):
    """The times come from ``benchmark.time_cases``; here they are made up."""
    wanted = dataclasses.replace(
        LAN,
        exact=dataclasses.replace(LAN.exact, byte_seconds=0.0),
        link=dataclasses.replace(LAN.link, efficiency=1.0, stall=0.0),
    )

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
        fit([s for s in samples if not s.num_chunks or s.message_bytes == 1 << 20], 4)
    with pytest.raises(ValueError, match="0 sizes of exact sums"):
        fit([s for s in samples if s.num_chunks], 4)
    with pytest.raises(ValueError, match="ranks=1 send nothing"):
        fit(samples, 1)
    with pytest.raises(ValueError, match="known for some samples"):
        fit(samples + made(LAN, rates=(1e8,)), 4)
    with pytest.raises(ValueError, match=r"seconds=0\.0 must be above 0"):
        Sample(message_bytes=1, seconds=0.0)
    with pytest.raises(ValueError, match="1 rank sends nothing"):
        calibrate(mesh(tp=1))
