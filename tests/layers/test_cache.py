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


def test_tokens_without_slots_do_not_go_unnoticed():
    slots = jnp.zeros((1, 1, 4, 2, 8), jnp.float32)
    full = KVCache(slots, slots, jnp.int32(3), jnp.zeros(1, jnp.int32))
    new = jnp.ones((1, 2, 2, 8), jnp.float32)
    layer, more = jnp.int32(0), jnp.ones((1, 5, 2, 8), jnp.float32)
    _, values = read_layer(jax.jit(write_layer)(full, layer, new, new), layer)
    assert np.isnan(values).any()
    with pytest.raises(ValueError, match="5 tokens do not fit into 4 slots"):
        write_layer(full, layer, more, more)
