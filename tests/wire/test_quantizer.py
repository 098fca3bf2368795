import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import WireFormat
from echo_jax.wire import quantizer
from tests import oracle
from tests.ranks import bits_of, draw

BITS = (2, 3, 4, 6, 8)


def _flush(values: np.ndarray) -> np.ndarray:
    """Subnormal numbers count as zero on many devices."""
    return np.where(np.abs(values) < 2.0**-126, np.float32(0), values)


def _encode(values, fmt):
    codes, scales = quantizer.encode(jnp.asarray(values, jnp.float32), fmt)
    return np.asarray(codes), np.asarray(scales)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("exponent", [-115, -60, 0, 60, 115])
def test_codes_scales_and_errors_are_those_of_the_oracle(bits, exponent):
    fmt = WireFormat(bits=bits, block_size=16, rotate=False)
    twin = oracle.Format(bits, 16, False)
    values = _flush(draw(bits, 300, 16) * np.float32(2.0**exponent))
    codes, scales, error = oracle.quantize_blocks(values, twin)
    ours, our_scales = _encode(values, fmt)
    np.testing.assert_array_equal(ours, codes)
    np.testing.assert_array_equal(our_scales, scales)
    decoded = quantizer.decode(jnp.asarray(ours), jnp.asarray(our_scales), fmt)
    np.testing.assert_array_equal(decoded, oracle.decode(codes, scales, twin))
    left = quantizer.rounding_error(jnp.asarray(values), decoded)
    np.testing.assert_array_equal(left, _flush(error))


@pytest.mark.parametrize("bits", BITS)
def test_every_code_is_used_and_none_is_zero(bits):
    """Odd multiples of half a scale, symmetric about zero."""
    fmt = WireFormat(bits=bits)
    codes = jnp.arange(2**bits, dtype=jnp.uint8)[None]
    values = np.asarray(quantizer.decode(codes, jnp.array([2.0]), fmt))[0]
    assert values.tolist() == [2 * q + 1 for q in range(-(2 ** (bits - 1)), 0)] + [
        2 * q + 1 for q in range(2 ** (bits - 1))
    ]
    np.testing.assert_array_equal(values, -values[::-1])
    # Each of these values has its own code as the nearest.
    block = jnp.asarray(np.resize(values, (16, 64)[values.size > 16])[None])
    if values.size <= 64:
        assert set(_encode(block, fmt)[0].ravel()) == set(range(2**bits))


@pytest.mark.parametrize("bits", BITS)
def test_peaks_of_either_sign_are_not_clipped(bits):
    """The largest magnitude lies within half a scale of the outermost level."""
    fmt = WireFormat(bits=bits, block_size=16, rotate=False)
    peaks = np.geomspace(1.0, 4.0, 5001).astype(np.float32)
    for sign in (1.0, -1.0):
        values = np.zeros((peaks.size, 16), np.float32)
        values[:, 3] = sign * peaks
        codes, scales = _encode(values, fmt)
        edge = 2**bits - 1 if sign > 0 else 0
        assert (codes[:, 3] == edge).all()
        read = (2**bits - 1) / 2 * scales.astype(np.float64)
        assert (np.abs(peaks - read) <= scales / 2).all()


@pytest.mark.parametrize("bits", BITS)
def test_scaling_by_a_power_of_two_scales_everything_exactly(bits):
    fmt = WireFormat(bits=bits, block_size=16)
    values = draw(1, 50, 16)
    codes, scales = _encode(values, fmt)
    for exponent in range(-110, 121, 10):
        factor = np.float32(2.0**exponent)
        again, again_scales = _encode(values * factor, fmt)
        np.testing.assert_array_equal(again, codes)
        np.testing.assert_array_equal(again_scales, scales * factor)


def test_scale_below_the_smallest_counts_as_zero_and_stays_owed():
    fmt = WireFormat(bits=4, block_size=16, rotate=False)
    factor = float(quantizer.scale_factor(fmt))
    values = np.zeros((2, 16), np.float32)
    values[0, 0] = 2.0**-120 / factor * 0.99
    values[1, 0] = 2.0**-120 / factor * 1.001
    codes, scales = _encode(values, fmt)
    assert scales[0] == 0.0
    assert scales[1] == 2.0**-120
    decoded = quantizer.decode(jnp.asarray(codes), jnp.asarray(scales), fmt)
    assert not bits_of(decoded[0]).any()
    left = quantizer.rounding_error(jnp.asarray(values), decoded)
    np.testing.assert_array_equal(left[0], values[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_has_a_nan_scale_and_owes_nothing(bad):
    fmt = WireFormat(bits=4, block_size=16)
    values = draw(0, 3, 16)
    values[1, 7] = bad
    codes, scales = _encode(values, fmt)
    assert np.isnan(scales).tolist() == [False, True, False]
    decoded = quantizer.decode(jnp.asarray(codes), jnp.asarray(scales), fmt)
    assert np.isnan(decoded[1]).all()
    assert np.isfinite(decoded[::2]).all()
    left = quantizer.rounding_error(jnp.asarray(values), decoded)
    assert not np.asarray(left[1]).any()
    assert np.isfinite(left).all()


@pytest.mark.parametrize("bits", [2, 3])
def test_a_scale_without_a_normal_reciprocal_counts_as_not_finite(bits):
    fmt = WireFormat(bits=bits, block_size=16, rotate=False)
    peak = 2.0**126 / float(quantizer.scale_factor(fmt))
    values = np.full((2, 16), -peak, np.float32)
    values[1] *= 1.01
    codes, scales = _encode(values, fmt)
    assert scales[0] == 2.0**126
    assert np.isnan(scales[1])
    decoded = quantizer.decode(jnp.asarray(codes), jnp.asarray(scales), fmt)
    np.testing.assert_allclose(decoded[0], values[0], rtol=2.0**-7)
    assert np.isnan(decoded[1]).all()


def test_a_value_that_decodes_to_infinity_owes_nothing():
    """At the very end of float32's range, where rounding the scale passes it."""
    fmt = WireFormat(bits=4, block_size=16, rotate=False)
    values = draw(0, 2, 16)
    values[1, 3], values[1, 5] = np.finfo(np.float32).max, 1e38
    codes, scales = _encode(values, fmt)
    assert np.isfinite(scales).all()
    decoded = quantizer.decode(jnp.asarray(codes), jnp.asarray(scales), fmt)
    assert np.isinf(decoded[1, 3])
    left = quantizer.rounding_error(jnp.asarray(values), decoded)
    assert left[1, 3] == 0.0
    assert left[1, 5] == values[1, 5] - decoded[1, 5]


def test_the_scale_survives_a_compiler_that_drops_casts():
    """The rounding to bfloat16 is an operation of its own, not a pair of casts."""
    fmt = WireFormat()
    jaxpr = jax.make_jaxpr(lambda v: quantizer.block_scales(v, fmt))(jnp.ones((2, 64)))
    primitives = [equation.primitive.name for equation in jaxpr.eqns]
    assert "reduce_precision" in primitives
    assert "convert_element_type" not in primitives
