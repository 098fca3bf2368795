"""The residual of a gradient sync: its pytree, and how it moves to another mesh."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from echo_jax.wire import compact
from echo_jax.wire.compact import Compact


class GradientSyncState(NamedTuple):
    """The residuals of a :class:`~echo_jax.training.GradientSync`, one a bucket.

    A pytree of arrays that belongs in the training state and its checkpoints. Every
    leaf has a leading axis of all ranks of the mesh, data ranks slowest, along which it
    is sharded: ``GradientSync.state_spec`` is the spec of all leaves.
    """

    # (ranks,): a checksum of the buckets and the format that the residuals belong to;
    # the same for every number of data ranks.
    layout: Any
    send: tuple  # of each bucket (ranks, data_ranks, blocks, block_size)
    reduce: tuple  # of each bucket (ranks, blocks, block_size)


def residual_rms(state: GradientSyncState) -> Float[Array, ""]:
    """Root mean square of the send residuals, over all ranks and buckets.

    Of a sum over data ranks, not of their mean. Zero without any bucket.
    """
    squares, count = jnp.zeros(()), 0
    for part in state.send:
        values = compact.expand(part)
        squares, count = squares + jnp.sum(jnp.square(values)), count + values.size
    return jnp.sqrt(squares / max(count, 1))


def fit_state(
    saved: GradientSyncState | None, fresh: GradientSyncState
) -> tuple[GradientSyncState, str | None]:
    """Moves a saved state to another mesh, or starts from zero; never silently.

    If only the number of data ranks differs, each new rank owes the mean over the old
    ranks of what they owed: the mean gradient is then repaid what it would have been
    repaid. If anything else differs (parameters, tensor ranks, format, buckets), and
    for residuals stored in one byte or half a byte, nothing can be carried over.

    Sharding: the result is sharded like ``fresh``.

    Args:
      saved: from a checkpoint, replicated arrays on any mesh; None if it has none.
      fresh: from :meth:`GradientSync.create`, on the mesh to be used.

    Returns:
      ``(state, words)``: the state, and what happened to the residuals in words, which
      is also issued as a warning; None if they are as they were saved.

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
