"""The key-value cache for generation."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from echo_jax.typing import AnyFloat


class KVCache(NamedTuple):
    """Keys and values of all layers for the tokens so far, in a fixed number of slots.

    All sequences of a batch end in the same slot: shorter ones start later, after
    ``padding`` slots that are masked out. A rank's arrays hold only its own heads.

    How many slots are in use is known on the device alone: who writes ``count`` tokens
    sees to it that ``length + count`` is at most the number of slots.
    """

    # Typed as Any because a cache of partition specs has the same fields.
    key: Any  # (layers, batch, slots, kv_heads, head_dim), rotated
    value: Any  # the same shape
    length: Any  # number of slots in use, a scalar for all sequences
    padding: Any  # (batch,), slots at the start of each sequence that hold no token

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
        """The cache with ``count`` more slots in use, once every layer has written."""
        return self._replace(length=self.length + count)


def write_layer(
    cache: KVCache, layer: Int[Array, ""], key: AnyFloat, value: AnyFloat
) -> KVCache:
    """Writes keys and values of new tokens ``(batch, count, heads, dim)``.

    Tokens for which there are no slots would be written over earlier ones: values
    become NaN instead.

    Raises:
      ValueError: for more tokens than the cache has slots.
    """
    count, slots = key.shape[1], cache.key.shape[2]
    if count > slots:
        raise ValueError(
            f"{count} tokens do not fit into {slots} slots: make a larger cache."
        )
    value = jnp.where(cache.length + count <= slots, value, jnp.nan)
    # All of one dtype, which Python's numbers would not be in 64-bit mode.
    zero = jnp.zeros_like(cache.length)
    start = (jnp.asarray(layer, zero.dtype), zero, cache.length, zero, zero)
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
