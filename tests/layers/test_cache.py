import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax.layers import KVCache
from echo_jax.layers.cache import read_layer, write_layer


@pytest.mark.parametrize("x64", [False, True])
def test_keys_and_values_lie_in_the_slots_after_those_in_use(x64):
    """Whatever the integers of the layer and of the length are."""
    new = np.random.default_rng(0).standard_normal((2, 3, 4, 8)).astype(np.float32)
    with jax.enable_x64(x64):
        slots = jnp.zeros((2, 2, 8, 4, 8), jnp.float32)
        cache = KVCache(slots, slots, jnp.int32(4), jnp.zeros(2, jnp.int32))
        for layer in (jnp.int32(1), jnp.arange(2)[1]):
            written = write_layer(cache, layer, jnp.asarray(new), jnp.asarray(-new))
            wanted = np.zeros(slots.shape[1:])
            wanted[:, 4:7] = new
            keys, values = read_layer(written, layer)
            np.testing.assert_array_equal(keys, wanted)
            np.testing.assert_array_equal(values, -wanted)
            assert not np.asarray(written.key[0]).any()
