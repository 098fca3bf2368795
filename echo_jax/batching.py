"""``vmap`` of a function whose arrays have a batch axis: one call, a larger batch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def fold_vmap(function: Callable) -> Callable:
    """The function, and under ``vmap`` the function of all batches laid end to end.

    Args:
      function: of trees of arrays with a leading batch axis, as are its results. It has
        no gradient afterwards.
    """
    folded = jax.custom_batching.custom_vmap(function)

    @folded.def_vmap
    def _(axis_size, in_batched, *args):
        def merge(leaf, is_batched):
            if not is_batched:
                leaf = jnp.broadcast_to(leaf, (axis_size, *leaf.shape))
            return leaf.reshape(-1, *leaf.shape[2:])

        out = folded(*jax.tree.map(merge, args, tuple(in_batched)))
        out = jax.tree.map(
            lambda leaf: leaf.reshape(axis_size, -1, *leaf.shape[1:]), out
        )
        return out, jax.tree.map(lambda _: True, out)

    return folded
