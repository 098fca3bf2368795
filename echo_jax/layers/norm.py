"""Root-mean-square normalization."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from echo_jax.collectives import exact
from echo_jax.layers.partitioning import make_param
from echo_jax.typing import AnyFloat


class RMSNorm(nnx.Module):
    r"""``x / rms(x) * scale`` over the last axis.

    Sharding: ``x`` must come from ``echo_pvary`` (or ``exact.pvary``); the scale is
    replicated. Each rank then computes a partial sum of the scale's gradient, and an
    exact sum over ranks adds these up: ``width`` values, the only traffic of a layer
    that is not quantized. For an ``x`` whose gradient is complete on every rank, that
    sum would be too large by the number of ranks.

    Args:
      width: length of the last axis.
      axis_name: the tensor-parallel axis.
      epsilon: added to the mean square.
      dtype: of the result; the mean square is computed in float32.
      param_dtype: of the scale.
      rngs: random keys (none is drawn).

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """

    def __init__(
        self,
        width: int,
        *,
        axis_name: str = "tensor",
        epsilon: float = 1e-5,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        """See the class."""
        self.scale = make_param(
            nnx.initializers.ones, (width,), (None,), dtype=param_dtype, rngs=rngs
        )
        self.axis_name, self.epsilon, self.dtype = axis_name, epsilon, dtype

    def __call__(self, x: AnyFloat) -> AnyFloat:
        """Normalizes ``x (..., width)``."""
        scale = exact.pvary(self.scale[...], self.axis_name)
        return _normalize(x, scale, self.epsilon, self.dtype)


# Gradients keep x alone and compute the rest again, in the pass that reads x anyway;
# without that they would keep several float32 arrays of its shape. Inside a scan over
# layers, as the decoder has it, nothing needs to keep XLA from merging the two; in
# unrolled layers it may, and then takes memory for fewer operations.
@functools.partial(jax.checkpoint, static_argnums=(2, 3), prevent_cse=False)
def _normalize(x: AnyFloat, scale: AnyFloat, epsilon: float, dtype) -> AnyFloat:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    normal = wide * jax.lax.rsqrt(mean_square + epsilon)
    return (normal * scale.astype(jnp.float32)).astype(dtype)
