"""What each rank adds in each all-reduce of a model: the values that are summed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from echo_jax.collectives import exact
from echo_jax.config import EchoConfig
from echo_jax.layers import RowParallelDense
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


class _Recorder:
    """Stands in for a block's last layer, and keeps what it is about to sum."""

    def __init__(self, layer: RowParallelDense):
        self.layer = layer
        self.seen: Any = None

    def __call__(self, x, residual, **options):
        kernel = self.layer.kernel[...].astype(self.layer.dtype)
        self.seen = x.astype(self.layer.dtype) @ kernel
        return self.layer(x, residual, **options)


def _record(
    decoder: Decoder, tokens: Int[Array, "batch length"]
) -> Float[Array, "calls batch length width"]:
    """This rank's partial sums."""
    axis, config = decoder.axis_name, EchoConfig().exact()
    graphdef, params = nnx.split(decoder.layers)

    def layer(stream, params):
        module: Any = nnx.merge(graphdef, params)
        attention, mlp = _Recorder(module.attention.out), _Recorder(module.mlp.down)
        module.attention.out, module.mlp.down = attention, mlp
        for norm, block in (
            (module.attention_norm, module.attention),
            (module.mlp_norm, module.mlp),
        ):
            x = norm(exact.pvary(stream, axis))
            stream, _ = block(x, None, config=config, add_to=stream)
        return stream, jnp.stack([attention.seen, mlp.seen])

    stream = exact.psum(decoder.embed(tokens), axis)
    _, seen = jax.lax.scan(layer, stream, params)
    return seen.reshape(-1, *seen.shape[2:])
