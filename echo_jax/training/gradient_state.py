"""What data ranks owe each other from step to step, and what a new mesh does to it."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from echo_jax.wire import compact
from echo_jax.wire.compact import Compact


class GradientSyncState(NamedTuple):
    """The residuals of a :class:`~echo_jax.training.GradientSync`, one a bucket.

    A pytree of arrays for a jitted training state and its checkpoints. Every leaf has
    an axis in front along which the ranks' own parts lie, data ranks first:
    ``GradientSync.state_spec`` is the spec of all of them.
    """

    layout: Any  # a number for what the residuals belong to, the data axis apart
    send: tuple  # of each bucket (ranks, data_ranks, blocks, block_size)
    reduce: tuple  # of each bucket (ranks, blocks, block_size)


def residual_rms(state: GradientSyncState) -> Float[Array, ""]:
    """Root mean square of what senders owe, in sums over data ranks."""
    squares, count = jnp.zeros(()), 0
    for part in state.send:
        values = compact.expand(part)
        squares, count = squares + jnp.sum(jnp.square(values)), count + values.size
    return jnp.sqrt(squares / max(count, 1))


def fit_state(
    saved: GradientSyncState | None, fresh: GradientSyncState
) -> tuple[GradientSyncState, str | None]:
    """A saved state on the mesh of today. What does not fit is said, never silent.

    Where only the number of data ranks differs, each new rank owes the mean over the
    old ranks of all that they owed, so that the mean gradient is repaid as it would
    have been. Where anything else does (parameters, tensor ranks, format, buckets), and
    for residuals in one byte or half a byte, nothing can be carried over.

    Args:
      saved: from a checkpoint, whole arrays on any mesh; None if it has none.
      fresh: from :meth:`GradientSync.create`, on the mesh to be used.

    Returns:
      ``(state, words)``: laid out like ``fresh``; what happened to the residuals, also
      issued as a warning, or None if they are as they were.

    Example:
        >>> state, words = fit_state(saved, sync.create(params, mesh))
    """
    if saved is None:
        return _warned(
            fresh, "The checkpoint has no residuals of gradients: they start"
        )
    wanted, found = jax.tree.leaves(fresh), jax.tree.leaves(saved)
    if not _same_layout(saved, fresh) or len(wanted) != len(found):
        return _warned(
            fresh,
            "The residuals of gradients were saved for other parameters, tensor ranks, "
            "formats or buckets: they cannot be carried over and start",
        )
    if all(a.shape == b.shape for a, b in zip(wanted, found, strict=True)):
        return jax.tree.map(_placed, saved, fresh), None
    old, new = (state.send[0].shape[1] for state in (saved, fresh))
    if any(isinstance(part, Compact) for part in (*saved.send, *fresh.send)):
        return _warned(
            fresh,
            f"The residuals of gradients were saved by {old} data ranks, {new} are "
            "here: in one byte or half a byte they cannot be carried over and start",
        )
    pairs = zip(saved.send, saved.reduce, fresh.send, strict=True)
    send = tuple(_spread(*pair) for pair in pairs)
    moved = fresh._replace(send=jax.tree.map(_placed, send, fresh.send))
    words = (
        f"The residuals of gradients were saved by {old} data ranks, {new} are here: "
        f"every rank now owes the mean of what those {old} owed."
    )
    warnings.warn(words, stacklevel=2)
    return moved, words


def _warned(fresh: GradientSyncState, words: str) -> tuple[GradientSyncState, str]:
    words += " from zero. What was owed, one rounding of a step's gradients, is lost."
    warnings.warn(words, stacklevel=3)
    return fresh, words


def _same_layout(saved: GradientSyncState, fresh: GradientSyncState) -> bool:
    return int(jnp.ravel(saved.layout)[0]) == int(jnp.ravel(fresh.layout)[0])


def _placed(value: jax.Array, like: jax.Array) -> jax.Array:
    return jax.device_put(jnp.asarray(value, like.dtype), like.sharding)


def _spread(
    send: Float[Array, "ranks chunks blocks block"],
    reduce: Float[Array, "ranks blocks block"],
    like: Float[Array, "new_ranks new_chunks new_blocks block"],
) -> Float[Array, "new_ranks new_chunks new_blocks block"]:
    """The mean of what the old data ranks owed, for each of the new ones."""
    ranks, chunks, blocks, size = send.shape
    others = ranks // chunks  # ranks of the other axes, along which nothing moves
    owed = jnp.sum(send.reshape(chunks, others, chunks, blocks, size), axis=0)
    # The rank that sums a chunk owes its reduce residual there.
    own = reduce.reshape(chunks, others, blocks, size).astype(owed.dtype)
    owed = (owed + jnp.moveaxis(own, 0, 1)) / chunks
    new_ranks, new_chunks, new_blocks, _ = like.shape
    owed = owed.reshape(others, chunks * blocks, size)
    # What fills up the last chunk owes nothing.
    length = new_chunks * new_blocks
    owed = jnp.pad(owed, ((0, 0), (0, max(0, length - chunks * blocks)), (0, 0)))
    owed = owed[:, :length].reshape(1, others, new_chunks, new_blocks, size)
    return jnp.broadcast_to(owed, (new_ranks // others, *owed.shape[1:])).reshape(
        like.shape
    )
