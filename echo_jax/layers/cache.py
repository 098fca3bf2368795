"""Keys and values of the tokens seen so far, for generation."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from echo_jax.typing import AnyFloat


class KVCache(NamedTuple):
    """What attention remembers, of all layers, in a fixed number of slots.

    Sequences of a batch end in the same slot: a shorter one starts later, behind
    ``padding`` slots that nothing attends to. Arrays of a rank hold its own heads.
    """

    # Not typed as arrays: partition specs stand in the same places.
    key: Any  # (layers, batch, slots, kv_heads, head_dim), rotated
    value: Any  # the same shape
    length: Any  # slots in use, a scalar, the same for every sequence
    padding: Any  # (batch,), slots at the start of each that hold no token

    def positions(self, count: int) -> Int[Array, "batch {count}"]:
        """Positions of the next ``count`` tokens of each sequence."""
        slots = self.length + jnp.arange(count)
        return jnp.maximum(slots - self.padding[:, None], 0)

    def mask(self, count: int) -> Bool[Array, "batch {count} slots"]:
        """Which slots each of the next ``count`` tokens may attend to."""
        query = self.length + jnp.arange(count)[:, None]
        slot = jnp.arange(self.key.shape[2])
        return (slot <= query) & (slot >= self.padding[:, None, None])

    def grown(self, count: int) -> "KVCache":
        """The cache after ``count`` tokens were written in every layer."""
        return self._replace(length=self.length + count)


def write_layer(
    cache: KVCache, layer: Int[Array, ""], key: AnyFloat, value: AnyFloat
) -> KVCache:
    """Writes keys and values of new tokens ``(batch, count, heads, dim)``."""
    start = (layer, 0, cache.length, 0, 0)
    return cache._replace(
        key=lax.dynamic_update_slice(cache.key, key[None], start),
        value=lax.dynamic_update_slice(cache.value, value[None], start),
    )


def read_layer(cache: KVCache, layer: Int[Array, ""]) -> tuple[AnyFloat, AnyFloat]:
    """Keys and values of one layer, ``(batch, slots, heads, dim)`` each."""
    take = lambda all_layers: lax.dynamic_index_in_dim(  # noqa: E731
        all_layers, layer, keepdims=False
    )
    return take(cache.key), take(cache.value)
