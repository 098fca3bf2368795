"""The compact residuals, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.wire import compact, quantizer
from echo_jax.wire.compact import Compact, Nibbles
from echo_jax.wire.format import WireFormat

KINDS = [Compact, Nibbles]


def left_out(kind, values, fmt=WireFormat(rotate=False)):
    """The residual of one rounding, its scales, and the exact error of it."""
    codes, scales = jax.jit(quantizer.encode, static_argnums=1)(values, fmt)
    kept = compact.compress(values, codes, scales, fmt, kind)
    odd = 2.0 * np.asarray(codes, np.float64) - (2 * fmt.half_levels - 1)
    error = np.asarray(values, np.float64) - odd * np.asarray(scales)[..., None] / 2
    return kept, np.asarray(scales, np.float64), error


def gaussian(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal((50, 64)) * scale, jnp.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_loses_at_most_half_a_step(kind, bits, scale):
    fmt = WireFormat(bits=bits, rotate=False)
    kept, scales, error = left_out(kind, gaussian(scale=scale), fmt)
    steps = compact.steps_of(kind)
    # The position of a value in its step is known to a few roundings of a float.
    slack = 2.0**bits * 2.0**-22
    bound = scales[:, None] * (0.5 / (steps - compact.HAIR) + slack)
    assert (np.abs(np.asarray(compact.expand(kept)) - error) <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_storage_loses_has_no_mean(kind):
    """A mean would be the same on all ranks and in all calls, and add up."""
    values = jnp.asarray(np.random.default_rng(3).standard_normal((50_000, 64)))
    kept, scales, error = left_out(kind, values.astype(jnp.float32))
    lost = (error - np.asarray(compact.expand(kept), np.float64)) / scales[:, None]
    # Uniform within a step, so its standard deviation is known.
    deviation = 1.0 / compact.steps_of(kind) / np.sqrt(12 * lost.size)
    assert abs(lost.mean()) <= 4 * deviation
    # Half a hair of a step, which reading the number itself would leave out.
    assert compact.MIDDLE / compact.steps_of(kind) > 10 * deviation


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_is_a_number_of_the_container(kind):
    values = jnp.concatenate([gaussian(), -jnp.ones((4, 64)), jnp.zeros((4, 64))])
    kept, _, _ = left_out(kind, values)
    assert kept.codes.dtype == jnp.float8_e4m3fnuz
    assert np.isfinite(np.asarray(kept.codes, np.float32)).all()
    # Adding zero, as differentiation does with cotangents, keeps the bytes.
    same = jax.jit(lambda codes: codes + jnp.zeros_like(codes))(kept.codes)
    np.testing.assert_array_equal(
        compact.to_bytes(same), compact.to_bytes(kept.codes)
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_owe_nothing_and_take_the_promised_bytes(kind):
    zeros = compact.zeros((3, 5, 64), kind)
    assert zeros.shape == (3, 5, 64)
    assert zeros.codes.size == 3 * 5 * (32 if kind is Nibbles else 64)
    assert not np.asarray(compact.expand(zeros)).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_block_that_is_not_finite_owes_nothing(kind, bad):
    kept, scales, _ = left_out(kind, gaussian().at[3, 7].set(bad))
    assert np.isnan(scales[3])
    assert not np.asarray(compact.expand(kept))[3].any()
    assert np.asarray(compact.expand(kept))[4].any()


def test_reciprocals_are_those_of_ieee():
    significands = np.arange(128, 256) / 128
    scales = np.concatenate(
        [significands * 2.0**exponent for exponent in (-119, -60, -3, 0, 40, 120)]
    ).astype(np.float32)
    inverse = jax.jit(quantizer.inverse_scales)(scales)
    np.testing.assert_array_equal(inverse, np.float32(1) / scales)
