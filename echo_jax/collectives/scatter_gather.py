"""``echo_psum_scatter`` and ``echo_all_gather``: the two halves of an all-reduce.

Each quantizes its values once; :func:`echo_jax.echo_psum` does so once or twice.
"""

import functools

import jax
import jax.numpy as jnp

from echo_jax import axes
from echo_jax.collectives import call, exact, exchange, traffic
from echo_jax.config import EchoConfig
from echo_jax.residual import (
    Residual,
    check_residual,
    check_scatter,
    scatter_shape,
)
from echo_jax.typing import AnyFloat, AxisName, FloatLike


def echo_psum_scatter(
    x: FloatLike,
    residual: Residual | None,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    tiled: bool = True,
    config: EchoConfig = EchoConfig(),
) -> tuple[AnyFloat, Residual | None]:
    """Sum over an axis, each rank keeping its part: ``lax.psum_scatter`` in few bits.

    Values are quantized once, when they are sent; ``residual.send`` keeps that error
    for the next call. The sum is taken in float32 and not quantized again. Gradient:
    the exact all-gather, as for ``lax.psum_scatter``; the residual's cotangent passes
    through unchanged.

    Sharding: ``x`` and the result vary along the axis.

    Args:
      x: this rank's partial sums; float32, bfloat16 or float16.
      residual: from ``init_residual(x, axis_name)``, or from the previous call; for
        the last dimension, from ``init_residual(x, axis_name, scatter_dimension=...)``.
        None for no feedback.
      axis_name: the axis, or a tuple of axes that act as one.
      scatter_dimension: the dimension that is cut into one part for each rank.
      tiled: as in ``lax.psum_scatter``, but True by default. True keeps the dimension,
        divided by the axis size; False needs it to equal the axis size and removes it.
      config: format, path and backend.

    Returns:
      ``(y, residual)``. Bytes: ``wire_bytes(..., verb="psum_scatter")``.

    Raises:
      ValueError: as :func:`echo_psum`, and if the dimension does not divide.

    Example:
        >>> y, residual = echo.echo_psum_scatter(x, residual, "tp", config=config)

    Source: as :func:`echo_psum`.
    """
    x = call.prepare("echo_psum_scatter", x, residual, axis_name, config)
    size = axes.axis_size(axis_name)
    check_scatter(x.shape, size, scatter_dimension, tiled=tiled)
    dimension = scatter_dimension % x.ndim
    parts = scatter_shape(x.shape, size, dimension, tiled=tiled)
    check_residual(residual, parts, axis_name, config)
    x, residual = call.unify(x, residual, axis_name, invariant=False)
    y, residual = _psum_scatter(x, residual, axis_name, dimension, tiled, config)
    return call.name_outputs(y, residual, "echo_psum_scatter")


def echo_all_gather(
    x: FloatLike,
    residual: Residual | None,
    axis_name: AxisName,
    *,
    axis: int = 0,
    tiled: bool = True,
    config: EchoConfig = EchoConfig(),
) -> tuple[AnyFloat, Residual | None]:
    """The tensors of all ranks in one: ``lax.all_gather`` in few bits.

    Values are quantized once; ``residual.send`` keeps the error for the next call.
    Gradient: the exact psum_scatter, as for ``lax.all_gather``; the residual's
    cotangent passes through unchanged.

    Sharding: ``x`` varies along the axis. The result is the same on every rank, bit for
    bit, but typed as varying, like that of ``lax.all_gather``.

    Args:
      x: this rank's part; float32, bfloat16 or float16.
      residual: from ``init_residual(x, axis_name)``; None for no feedback.
      axis_name: the axis, or a tuple of axes that act as one.
      axis: the dimension of the result along which the parts are put together.
      tiled: as in ``lax.all_gather``, but True by default. True concatenates along the
        dimension ``axis``; False stacks along a new one.
      config: format, path and backend.

    Returns:
      ``(y, residual)``. Bytes: ``wire_bytes(..., verb="all_gather")``.

    Raises:
      ValueError: as :func:`echo_psum`, and if ``axis`` is out of range.

    Example:
        >>> y, residual = echo.echo_all_gather(x, residual, "tp", config=config)

    Source: as :func:`echo_psum`.
    """
    x = call.prepare("echo_all_gather", x, residual, axis_name, config)
    ndim = x.ndim if tiled else x.ndim + 1
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"echo_all_gather: axis={axis} is out of range for x of shape {x.shape} "
            f"with tiled={tiled}."
        )
    check_residual(residual, x.shape, axis_name, config)
    x, residual = call.unify(x, residual, axis_name, invariant=False)
    y, residual = _all_gather(x, residual, axis_name, axis % ndim, tiled, config)
    return call.name_outputs(y, residual, "echo_all_gather")


def _scatter_forward(x, residual, axis_name, dimension, tiled, config):
    size = axes.axis_size(axis_name)
    parts = scatter_shape(x.shape, size, dimension, tiled=tiled)
    exactly = traffic.takes_exact_path(parts, x.dtype, config)
    is_small = traffic.is_small(parts, x.dtype, config)
    paying = call.pays(residual, config, is_small=is_small)
    chunks = x
    if tiled:
        cut = (size, x.shape[dimension] // size)
        chunks = x.reshape(*x.shape[:dimension], *cut, *x.shape[dimension + 1 :])
    chunks = jnp.moveaxis(chunks, dimension, 0)
    shape = chunks.shape[1:]
    chunks = chunks.reshape(parts)
    owed = residual if paying else None
    if exactly:
        chunks, owed = exact.pay_sender(chunks, owed, config.format)
        y = axes.psum_scatter(chunks, axis_name)
    else:
        y, owed = exchange.reduce_scatter(chunks, owed, axis_name, config)
    return y.reshape(shape), owed if paying else residual


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _psum_scatter(x, residual, axis_name, dimension, tiled, config):
    return _scatter_forward(x, residual, axis_name, dimension, tiled, config)


def _psum_scatter_fwd(x, residual, axis_name, dimension, tiled, config):
    return _psum_scatter(x, residual, axis_name, dimension, tiled, config), None


def _psum_scatter_bwd(axis_name, dimension, tiled, config, _, cotangents):
    axes.axis_size(axis_name)  # else JAX's own words for a gradient outside a vmap
    y_bar, residual_bar = cotangents
    x_bar = axes.all_gather(y_bar, axis_name, axis=dimension, tiled=tiled)
    return x_bar, residual_bar


_psum_scatter.defvjp(_psum_scatter_fwd, _psum_scatter_bwd)


def _gather_forward(x, residual, axis_name, axis, tiled, config):
    exactly = traffic.takes_exact_path(x.shape, x.dtype, config)
    is_small = traffic.is_small(x.shape, x.dtype, config)
    paying = call.pays(residual, config, is_small=is_small)
    owed = residual if paying else None
    if exactly:
        x, owed = exact.pay_sender(x, owed, config.format)
        y = axes.all_gather(x, axis_name)
    else:
        y, owed = exchange.gather(x, owed, axis_name, config)
    y = jnp.moveaxis(y, 0, axis)
    if tiled:
        length = axes.axis_size(axis_name) * x.shape[axis]
        y = y.reshape(*x.shape[:axis], length, *x.shape[axis + 1 :])
    return y, owed if paying else residual


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _all_gather(x, residual, axis_name, axis, tiled, config):
    return _gather_forward(x, residual, axis_name, axis, tiled, config)


def _all_gather_fwd(x, residual, axis_name, axis, tiled, config):
    return _all_gather(x, residual, axis_name, axis, tiled, config), None


def _all_gather_bwd(axis_name, axis, tiled, config, _, cotangents):
    axes.axis_size(axis_name)  # else JAX's own words for a gradient outside a vmap
    y_bar, residual_bar = cotangents
    x_bar = axes.psum_scatter(y_bar, axis_name, axis=axis, tiled=tiled)
    return x_bar, residual_bar


_all_gather.defvjp(_all_gather_fwd, _all_gather_bwd)
