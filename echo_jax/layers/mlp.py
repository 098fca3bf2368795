"""The gated feed-forward block."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from echo_jax.config import EchoConfig
from echo_jax.layers.dense import (
    ColumnParallelDense,
    RowParallelDense,
    apply_side_by_side,
    default_init,
)
from echo_jax.layers.partitioning import Initializer
from echo_jax.residual import Residual
from echo_jax.typing import AnyFloat


class SwiGLU(nnx.Module):
    """``down(silu(gate(x)) * up(x))``, the hidden features sharded over the axis.

    Sharding: the input varies along the axis (apply ``echo_pvary`` and the norm first);
    the output is replicated.

    Args:
      width: width of the stream.
      hidden: hidden features over all ranks; a multiple of the axis size.
      axis_name: the tensor-parallel axis.
      out_init: initializer of the down projection.
      dtype: of the computation.
      param_dtype: of the parameters.
      rngs: random keys.

    Source: Shazeer, "GLU Variants Improve Transformer", 2020.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        axis_name: str = "tensor",
        out_init: Initializer = default_init,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        """See the class."""
        kinds = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        kinds["axis_name"] = axis_name
        self.gate = ColumnParallelDense(width, hidden, **kinds)
        self.up = ColumnParallelDense(width, hidden, **kinds)
        self.down = RowParallelDense(hidden, width, kernel_init=out_init, **kinds)

    def __call__(
        self,
        x: AnyFloat,
        residual: Residual | None,
        *,
        config: EchoConfig,
        add_to: AnyFloat | None = None,
    ) -> tuple[AnyFloat, Residual | None]:
        """The output ``(..., width)``, summed over ranks, plus ``add_to``."""
        return self.down(self._hidden(x), residual, config=config, add_to=add_to)

    def partial(self, x: AnyFloat) -> AnyFloat:
        """This rank's summand in the sum of ``__call__``."""
        return self.down.partial(self._hidden(x))

    def _hidden(self, x: AnyFloat) -> AnyFloat:
        return _gated(*apply_side_by_side(x, self.gate, self.up))


# Gradients keep these two alone, and not what lies between them and the product.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _gated(gate: AnyFloat, up: AnyFloat) -> AnyFloat:
    return jax.nn.silu(gate) * up
