"""What each rank adds in each all-reduce of a model: the values that are summed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from echo_jax.collectives import exact
from echo_jax.models.decoder import Decoder
from echo_jax.models.loading import LoadedModel


def partial_sums(
    model: LoadedModel, tokens: Int[Array | np.ndarray, "batch length"]
) -> Float[Array, "calls ranks batch length width"]:
    """Runs a model with exact sums and returns what every rank put into each of them.

    The two sums of every layer in order of depth, in the dtype of the computation;
    those of the vocabulary are left out. Everything is held at once: meant for a few
    hundred tokens.

    Sharding: the result is sharded by rank over the model's tensor axis.

    Args:
      model: from :func:`~echo_jax.models.load`.
      tokens: token ids.

    Returns:
      Partial sums, whose sum over ``ranks`` is what the stream gains in each call.

    Example:
        >>> sums = partial_sums(model, tokens)
        >>> peaks = jnp.max(jnp.abs(sums), axis=(1, 2, 3, 4))  # of each call
    """
    record = model.on_ranks(
        lambda decoder, tokens: _record(decoder, tokens)[:, None],
        (PartitionSpec(),),
        PartitionSpec(None, model.axis_name),
    )
    return jax.jit(record)(model.params, jnp.asarray(tokens))


def _record(
    decoder: Decoder, tokens: Int[Array, "batch length"]
) -> Float[Array, "calls batch length width"]:
    """This rank's partial sums."""
    axis = decoder.axis_name
    graphdef, params = nnx.split(decoder.layers)

    def layer(stream, params):
        module: Any = nnx.merge(graphdef, params)
        seen = []
        for norm, block in (
            (module.attention_norm, module.attention),
            (module.mlp_norm, module.mlp),
        ):
            partial = block.partial(norm(exact.pvary(stream, axis)))
            stream = stream + exact.psum(partial, axis)
            seen.append(partial)
        return stream, jnp.stack(seen)

    stream = exact.psum(decoder.embed(tokens), axis)
    _, seen = jax.lax.scan(layer, stream, params)
    return seen.reshape(-1, *seen.shape[2:])
