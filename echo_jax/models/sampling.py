"""The next token from logits that are sharded by vocabulary, the same on every rank."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from echo_jax import axes
from echo_jax.typing import AnyFloat


def check_seed(seed: int) -> None:
    """Refuses a seed of more than 32 bits, of which JAX would drop some unsaid.

    Raises:
      ValueError: saying which are possible.
    """
    if type(seed) is not int or not 0 <= seed < 1 << 32:
        raise ValueError(f"seed={seed!r} must be an int from 0 to {(1 << 32) - 1:,}.")


def greedy(
    logits: Float[Array, "batch local_vocab"], axis_name: str
) -> Int[Array, "batch"]:
    """The likeliest token; of equal ones that of the lowest id.

    Two numbers a sequence cross ranks. All ranks compare the same gathered numbers, so
    that they agree whatever the last bits are.

    Sharding: ``logits`` vary along the axis, the tokens do not.
    """
    local = jnp.argmax(logits, axis=-1)
    value = jnp.take_along_axis(logits, local[:, None], axis=-1)[:, 0]
    token = local + lax.axis_index(axis_name) * logits.shape[-1]
    values, tokens = _gather(value, axis_name), _gather(token, axis_name)
    # The first of equal values: the lowest rank, which has the lowest ids.
    best = jnp.argmax(values, axis=0)
    return jnp.take_along_axis(tokens, best[None], axis=0)[0].astype(jnp.int32)


def sample(
    logits: Float[Array, "batch local_vocab"],
    key: Array,
    *,
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
    axis_name: str,
) -> Int[Array, "batch"]:
    """A token drawn from the likeliest ones that together have ``top_p``.

    The logits are gathered; every rank then draws with the same key.

    Args:
      logits: this rank's part of the vocabulary.
      key: random key, the same on every rank.
      temperature: what logits are divided by; positive.
      top_p: probability that the tokens drawn from have together; the likeliest one is
        always among them.
      axis_name: the tensor-parallel axis.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020.
    """
    gathered = _gather(logits.astype(jnp.float32), axis_name)
    whole = jnp.moveaxis(gathered, 0, 1).reshape(logits.shape[0], -1)
    order = jnp.argsort(-whole, axis=-1)
    ranked = jnp.take_along_axis(whole, order, axis=-1) / temperature
    likely = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(likely, axis=-1) - likely
    kept = (before < top_p).at[:, 0].set(True)
    drawn = jax.random.categorical(key, jnp.where(kept, ranked, -jnp.inf), axis=-1)
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)


def _gather(x: AnyFloat | Int[Array, "..."], axis_name: str) -> Array:
    """Every rank's ``x`` along a new first axis, typed as the same on every rank."""
    # A plain vmap rejects to="invarying".
    to = "invarying" if axes.is_tracked(axis_name) else "varying"
    return axes.all_gather(x, axis_name, to=to)
