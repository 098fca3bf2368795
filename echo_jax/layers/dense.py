"""Dense layers sharded by output features (column) or by input features (row)."""

import functools
import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from echo_jax.collectives import echo_psum
from echo_jax.config import EchoConfig
from echo_jax.layers.partitioning import Initializer, make_param
from echo_jax.residual import Residual
from echo_jax.typing import AnyFloat

default_init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")


class ColumnParallelDense(nnx.Module):
    """``x @ kernel`` with the output features sharded over the axis. No communication.

    Sharding: ``x`` varies along the axis (apply ``echo_pvary`` to the stream first);
    each rank returns its own features.

    Args:
      in_features: length of x's last axis, which is not sharded.
      out_features: features over all ranks.
      axis_name: the tensor-parallel axis.
      use_bias: add a bias, sharded like the features.
      kernel_init: initializer of the kernel.
      dtype: of the computation.
      param_dtype: of the parameters.
      rngs: random keys.

    Source: Shoeybi et al., "Megatron-LM", 2019.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis_name: str = "tensor",
        use_bias: bool = False,
        kernel_init: Initializer = default_init,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        """See the class."""
        shape, spec = (in_features, out_features), (None, axis_name)
        self.kernel = make_param(kernel_init, shape, spec, dtype=param_dtype, rngs=rngs)
        self.bias = (
            make_param(
                nnx.initializers.zeros,
                (out_features,),
                (axis_name,),
                dtype=param_dtype,
                rngs=rngs,
            )
            if use_bias
            else None
        )
        self.dtype = dtype

    def __call__(self, x: AnyFloat) -> AnyFloat:
        """``(..., in_features)`` to this rank's ``(..., out_features / N)``."""
        return self.add_bias(x.astype(self.dtype) @ self.kernel[...].astype(self.dtype))

    def add_bias(self, y: AnyFloat) -> AnyFloat:
        """``y`` plus this rank's bias, if there is one."""
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)


def apply_side_by_side(
    x: AnyFloat, *layers: ColumnParallelDense
) -> tuple[AnyFloat, ...]:
    """``layer(x)`` of each layer, by one product with all their kernels.

    The gradient of ``x`` is then one product too. From a product for each layer, every
    one would write, read and round a part of it that is as large as the stream, which
    XLA does not merge. The kernels are copied side by side, which few tokens, as in
    generation, are not worth: fewer than ``in_features`` take the layers one by one,
    and so do layers of a subclass or of several dtypes.

    Args:
      x: ``(..., in_features)``.
      layers: of these input features.

    Returns:
      For each layer its ``(..., out_features / N)``.
    """
    plain = all(type(layer) is ColumnParallelDense for layer in layers)
    same_dtype = len({jnp.dtype(layer.dtype) for layer in layers}) == 1
    few_tokens = x.size < x.shape[-1] ** 2
    if few_tokens or not plain or not same_dtype:
        return tuple(layer(x) for layer in layers)
    kernels = [layer.kernel[...] for layer in layers]
    product = _joint_product(x, kernels, layers[0].dtype)
    ends = itertools.accumulate(kernel.shape[-1] for kernel in kernels)
    outputs = jnp.split(product, [*ends][:-1], axis=-1)
    return tuple(map(ColumnParallelDense.add_bias, layers, outputs))


# Gradients keep the parameters, not the copy.
@functools.partial(jax.checkpoint, static_argnums=2, prevent_cse=False)
def _joint_product(x: AnyFloat, kernels: list, dtype) -> AnyFloat:
    joint = jnp.concatenate([kernel.astype(dtype) for kernel in kernels], axis=-1)
    return x.astype(dtype) @ joint


class RowParallelDense(nnx.Module):
    """``x @ kernel`` with the input features sharded over the axis.

    The partial products are summed over ranks by :func:`echo_jax.echo_psum`.

    Sharding: each rank has its own features of ``x``; the result is replicated.

    Args:
      in_features: features over all ranks.
      out_features: length of the result's last axis, which is not sharded.
      axis_name: the tensor-parallel axis.
      use_bias: add a replicated bias, after the sum.
      kernel_init: initializer of the kernel.
      dtype: of the computation and of the partial sums.
      param_dtype: of the parameters.
      rngs: random keys.

    Source: Shoeybi et al., "Megatron-LM", 2019.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis_name: str = "tensor",
        use_bias: bool = False,
        kernel_init: Initializer = default_init,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        """See the class."""
        shape, spec = (in_features, out_features), (axis_name, None)
        self.kernel = make_param(kernel_init, shape, spec, dtype=param_dtype, rngs=rngs)
        self.bias = (
            make_param(
                nnx.initializers.zeros,
                (out_features,),
                (None,),
                dtype=param_dtype,
                rngs=rngs,
            )
            if use_bias
            else None
        )
        self.axis_name, self.dtype = axis_name, dtype

    def __call__(
        self,
        x: AnyFloat,
        residual: Residual | None,
        *,
        config: EchoConfig,
        add_to: AnyFloat | None = None,
    ) -> tuple[AnyFloat, Residual | None]:
        """This rank's ``(..., in_features / N)`` to ``(..., out_features)``, summed.

        The sum is added to ``add_to``, usually the residual stream, if it is given.
        """
        y, residual = echo_psum(
            self.partial(x), residual, self.axis_name, add_to=add_to, config=config
        )
        if self.bias is not None:
            y = y + self.bias[...].astype(self.dtype)
        return y, residual

    def partial(self, x: AnyFloat) -> AnyFloat:
        """This rank's summand; the bias is added once, after the sum."""
        return x.astype(self.dtype) @ self.kernel[...].astype(self.dtype)
