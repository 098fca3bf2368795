import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import WireFormat
from echo_jax.wire import bounds, rotation
from tests import oracle
from tests.ranks import bits_of, draw

BLOCKS = (16, 32, 64, 128, 256)


@pytest.mark.parametrize("block_size", BLOCKS)
def test_matrix_is_symmetric_orthogonal_and_that_of_the_oracle(block_size):
    matrix = rotation.hadamard(block_size)
    np.testing.assert_array_equal(matrix, oracle.hadamard(block_size))
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(matrix @ matrix, block_size * np.eye(block_size))


@pytest.mark.parametrize("block_size", BLOCKS)
def test_in_and_out_is_the_identity_exactly_on_integers(block_size):
    fmt = WireFormat(block_size=block_size)
    x = np.random.default_rng(0).integers(-1000, 1000, (3, block_size))
    there = rotation.rotate(jnp.asarray(x, jnp.float32), fmt)
    np.testing.assert_array_equal(rotation.unrotate(there, fmt), x)


@pytest.mark.parametrize("block_size", BLOCKS)
def test_values_are_those_of_the_oracle_within_its_summation_error(block_size):
    fmt = WireFormat(block_size=block_size)
    twin = oracle.Format(4, block_size, True)
    x = draw(block_size, 20, block_size, scale=3.0)
    distance = np.abs(rotation.rotate(jnp.asarray(x), fmt) - oracle.rotate(x, twin))
    assert (distance <= oracle.rotation_slack(x, twin)[:, None]).all()


@pytest.mark.parametrize("block_size", BLOCKS)
def test_an_outlier_becomes_equal_magnitudes(block_size):
    fmt = WireFormat(block_size=block_size)
    x = jnp.zeros((1, block_size)).at[0, 5].set(100.0)
    spread = np.abs(rotation.rotate(x, fmt))
    assert (spread == 100.0 * 2.0**-fmt.forward_exponent).all()


@pytest.mark.parametrize("block_size", BLOCKS)
def test_gains_are_reached_by_a_constant_block(block_size):
    fmt = WireFormat(block_size=block_size)
    ones = jnp.ones((1, block_size))
    assert jnp.abs(rotation.rotate(ones, fmt)).max() == bounds.rotation_gain(fmt)
    assert jnp.abs(rotation.unrotate(ones, fmt)).max() == bounds.inverse_gain(fmt)


def test_no_rotation_is_the_identity():
    fmt = WireFormat(rotate=False)
    x = jnp.asarray(draw(0, 2, 64))
    np.testing.assert_array_equal(bits_of(rotation.rotate(x, fmt)), bits_of(x))
    np.testing.assert_array_equal(bits_of(rotation.unrotate(x, fmt)), bits_of(x))
    assert bounds.rotation_gain(fmt) == bounds.inverse_gain(fmt) == 1.0
