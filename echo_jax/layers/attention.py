"""Causal grouped-query attention with rotary positions, heads sharded over the axis."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from echo_jax.config import EchoConfig
from echo_jax.layers.attention_kernel import (
    AttentionChoice,
    attend,
    attend_masked,
    check_choice,
)
from echo_jax.layers.cache import KVCache, read_layer, write_layer
from echo_jax.layers.dense import (
    ColumnParallelDense,
    RowParallelDense,
    apply_side_by_side,
    default_init,
)
from echo_jax.layers.norm import RMSNorm
from echo_jax.layers.partitioning import Initializer
from echo_jax.layers.rope import RopeScaling, apply_rope
from echo_jax.residual import Residual
from echo_jax.typing import AnyFloat


class Attention(nnx.Module):
    """Each rank computes its own heads; the output projection sums over ranks.

    Sharding: the input varies along the axis (apply ``echo_pvary`` and the norm first);
    the output is replicated. The numbers of query heads and of key-value heads must be
    multiples of the axis size.

    Args:
      width: width of the stream.
      num_heads: query heads over all ranks.
      num_kv_heads: key-value heads over all ranks; divides ``num_heads``.
      head_dim: length of one head.
      axis_name: the tensor-parallel axis.
      rope_theta: base of the rotary wavelengths.
      rope_scaling: how wavelengths are stretched for positions beyond those of
        training; None for not at all.
      qk_norm_epsilon: epsilon of an RMSNorm of each query and key head before the
        rotary embedding; None for no such norm.
      attention: what computes it: ``"xla"`` the operations of XLA, whose memory grows
        with the square of the length; ``"cudnn"`` cuDNN's flash attention on NVIDIA
        GPUs; ``"auto"`` the latter where device, dtype and ``head_dim`` allow it.
      out_init: initializer of the output projection.
      dtype: of the computation.
      param_dtype: of the parameters.
      rngs: random keys.

    Raises:
      ValueError: if ``attention="cudnn"`` is asked for with a dtype or a ``head_dim``
        that it is not used for or, when called, on other devices than NVIDIA GPUs.

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
        rope_scaling: RopeScaling | None = None,
        qk_norm_epsilon: float | None = None,
        attention: AttentionChoice = "auto",
        out_init: Initializer = default_init,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        """See the class."""
        check_choice(attention, dtype, head_dim)
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        kinds["axis_name"] = axis_name
        heads, kv_heads = num_heads * head_dim, num_kv_heads * head_dim
        self.query = ColumnParallelDense(width, heads, **kinds)
        self.key = ColumnParallelDense(width, kv_heads, **kinds)
        self.value = ColumnParallelDense(width, kv_heads, **kinds)
        self.out = RowParallelDense(heads, width, kernel_init=out_init, **kinds)
        if qk_norm_epsilon is None:
            self.query_norm = self.key_norm = None
        else:
            self.query_norm = RMSNorm(head_dim, epsilon=qk_norm_epsilon, **kinds)
            self.key_norm = RMSNorm(head_dim, epsilon=qk_norm_epsilon, **kinds)
        self.head_dim, self.rope_theta = head_dim, rope_theta
        self.rope_scaling = rope_scaling
        self.attention: AttentionChoice = attention

    def __call__(
        self,
        x: AnyFloat,
        residual: Residual | None,
        *,
        config: EchoConfig,
        add_to: AnyFloat | None = None,
    ) -> tuple[AnyFloat, Residual | None]:
        """The output ``(batch, length, width)``, summed over ranks, plus ``add_to``."""
        return self.out(self._mix(x), residual, config=config, add_to=add_to)

    def partial(self, x: AnyFloat) -> AnyFloat:
        """This rank's summand in the sum of ``__call__``."""
        return self.out.partial(self._mix(x))

    def extend(
        self,
        x: AnyFloat,
        residual: Residual | None,
        cache: KVCache,
        layer: Int[Array, ""],
        *,
        config: EchoConfig,
        add_to: AnyFloat | None = None,
    ) -> tuple[AnyFloat, Residual | None, KVCache]:
        """As ``__call__``, for the tokens that follow those in the cache.

        Args:
          x: ``(batch, length, width)``, the next ``length`` tokens of each sequence.
          residual: from the previous call, or None for no feedback.
          cache: keys and values of the earlier tokens. Its ``length`` is not changed,
            because the other layers still need it: see :meth:`KVCache.grown`.
          layer: index of this layer in the cache.
          config: configuration of the output's sum.
          add_to: the stream that the sum is added to, or None.

        Returns:
          ``(y, residual, cache)``, the cache with the new keys and values written.
        """
        query, key, value = self._project(x, cache.positions(x.shape[1]))
        cache = write_layer(cache, layer, key, value)
        keys, values = read_layer(cache, layer)
        mask = cache.mask(x.shape[1])
        mixed = attend_masked(query, keys, values, mask, choice=self.attention)
        mixed = mixed.reshape(*mixed.shape[:2], -1)
        y, residual = self.out(mixed, residual, config=config, add_to=add_to)
        return y, residual, cache

    def _mix(self, x: AnyFloat) -> AnyFloat:
        """The concatenated outputs of this rank's heads."""
        query, key, value = self._project(x, jnp.arange(x.shape[1]))
        mixed = attend(query, key, value, choice=self.attention)
        return mixed.reshape(*mixed.shape[:2], -1)

    def _project(
        self, x: AnyFloat, positions: Int[Array, "*batch length"]
    ) -> tuple[AnyFloat, AnyFloat, AnyFloat]:
        """Rotated queries and keys, and values, split into this rank's heads."""
        projected = apply_side_by_side(x, self.query, self.key, self.value)
        query, key, value = map(self._heads, projected)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        theta, scaling = self.rope_theta, self.rope_scaling
        query = apply_rope(query, positions, theta, scaling)
        key = apply_rope(key, positions, theta, scaling)
        return query, key, value

    def _heads(self, x: AnyFloat) -> AnyFloat:
        return x.reshape(*x.shape[:-1], -1, self.head_dim)
