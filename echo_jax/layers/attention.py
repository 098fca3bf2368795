"""Causal grouped-query attention with rotary positions, heads cut over the axis."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from echo_jax.config import EchoConfig
from echo_jax.layers.dense import ColumnParallelDense, RowParallelDense, default_init
from echo_jax.layers.partitioning import Initializer
from echo_jax.residual import Residual
from echo_jax.typing import AnyFloat


def apply_rope(
    x: Float[Array, "batch length heads head_dim"],
    positions: Int[Array, "length"],
    theta: float,
) -> Float[Array, "batch length heads head_dim"]:
    """Rotates the two halves of each head by angles that grow with position.

    Args:
      x: queries or keys.
      positions: position of each token.
      theta: base of the wavelengths.

    Returns:
      The rotated heads, in x's dtype.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding",
    2021; halves paired as in the Llama checkpoints of Hugging Face.
    """
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Each rank attends with its own heads; the output projection sums over ranks.

    Sharding: the input varies along the axis (``echo_pvary`` and the norm in front);
    the output is the same on every rank. Query and key-value heads must be multiples
    of the axis size.

    Args:
      width: width of the stream.
      num_heads: query heads over all ranks.
      num_kv_heads: key-value heads over all ranks; divides ``num_heads``.
      head_dim: length of one head.
      axis_name: the tensor-parallel axis.
      rope_theta: base of the rotary wavelengths.
      out_init: initializer of the output projection.
      dtype: of the computation.
      param_dtype: of the parameters.
      rngs: random keys.

    Source: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models
    from Multi-Head Checkpoints", 2023.
    """

    def __init__(
        self,
        width: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        axis_name: str = "tensor",
        rope_theta: float = 10_000.0,
        out_init: Initializer = default_init,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        """See the class."""
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        kinds["axis_name"] = axis_name
        heads, kv_heads = num_heads * head_dim, num_kv_heads * head_dim
        self.query = ColumnParallelDense(width, heads, **kinds)
        self.key = ColumnParallelDense(width, kv_heads, **kinds)
        self.value = ColumnParallelDense(width, kv_heads, **kinds)
        self.out = RowParallelDense(heads, width, kernel_init=out_init, **kinds)
        self.head_dim, self.rope_theta = head_dim, rope_theta

    def __call__(
        self, x: AnyFloat, residual: Residual | None, *, config: EchoConfig
    ) -> tuple[AnyFloat, Residual | None]:
        """``(batch, length, width)`` to the same shape, summed over ranks."""
        positions = jnp.arange(x.shape[1])
        query = apply_rope(self._heads(self.query(x)), positions, self.rope_theta)
        key = apply_rope(self._heads(self.key(x)), positions, self.rope_theta)
        value = self._heads(self.value(x))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        return self.out(mixed, residual, config=config)

    def _heads(self, x: AnyFloat) -> AnyFloat:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)
