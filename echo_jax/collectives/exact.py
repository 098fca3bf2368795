"""Exact, full-width counterparts of the collectives, with gradients right everywhere.

``jax.lax.psum`` has the right gradient only where JAX tracks along which axes a value
varies (``check_vma=True``). The functions here keep Megatron's pair of operators
(Shoeybi et al., "Megatron-LM", 2019) explicit, so that the same model also has right
gradients under ``check_vma=False``, with ``grad`` taken inside the ``shard_map``, and
under ``vmap(axis_name=...)``.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from echo_jax import axes
from echo_jax.residual import Residual, zeros_like
from echo_jax.typing import AnyFloat, AxisName
from echo_jax.wire import blocks as blocking
from echo_jax.wire import compact
from echo_jax.wire.format import WireFormat
from echo_jax.wire.rotation import unrotate


def psum(x: AnyFloat, axis_name: AxisName) -> AnyFloat:
    """Exact sum over the axis; its gradient is the identity.

    Sharding: ``x`` varies along the axis, the result does not.

    Args:
      x: each rank's partial sum.
      axis_name: the axis, or a tuple of axes.

    Returns:
      ``lax.psum(x, axis_name)``.

    Raises:
      ValueError: if the axis is not bound here.
    """
    axes.axis_size(axis_name)
    return _psum(_vary(x, axis_name), axis_name)


def pvary(x: AnyFloat, axis_name: AxisName) -> AnyFloat:
    """Identity whose gradient is an exact sum over the axis: the conjugate of psum.

    Sharding: ``x`` is replicated over the axis, and so is the result; but the result
    is typed as varying, so that each rank can compute something of its own from it.

    Args:
      x: a replicated value, an activation or a parameter.
      axis_name: the axis, or a tuple of axes.

    Returns:
      ``x``.

    Raises:
      ValueError: if the axis is not bound here; where types are tracked, if ``x``
        already varies along it.
    """
    axes.axis_size(axis_name)
    axes.check_invariant("pvary", x, axis_name)
    return _pvary(x, axis_name)


def all_reduce(
    x: AnyFloat, residual: Residual | None, axis_name: AxisName, fmt: WireFormat
) -> tuple[AnyFloat, Residual | None]:
    """``lax.psum`` of ``x`` plus all residuals, in x's dtype. Defines no gradient."""
    if residual is None or x.size == 0:
        return lax.psum(x, axis_name), residual
    # The reduce residual belongs to the one chunk that this rank sums.
    send, rank = compact.expand(residual.send), lax.axis_index(axis_name)
    mine = lax.dynamic_index_in_dim(send, rank, keepdims=False)
    mine = mine + compact.expand(residual.reduce)
    owed = lax.dynamic_update_index_in_dim(send, mine, rank, 0)
    return lax.psum(_add(x, owed, fmt), axis_name), zeros_like(residual)


def pay_sender(
    x: AnyFloat, residual: Residual | None, fmt: WireFormat
) -> tuple[AnyFloat, Residual | None]:
    """Adds the send residual to ``x``, for the collectives that round only once."""
    if residual is None or x.size == 0:
        return x, residual
    nothing = jax.tree.map(jnp.zeros_like, residual.send)
    paid = dataclasses.replace(residual, send=nothing)
    return _add(x, compact.expand(residual.send), fmt), paid


def _add(x: AnyFloat, owed: AnyFloat, fmt: WireFormat) -> AnyFloat:
    """``x`` plus a residual in block coordinates, rounded once to x's dtype."""
    rows = blocking.from_blocks(unrotate(owed, fmt), blocking.row_shape(x.shape))
    return (x.astype(jnp.float32) + rows.reshape(x.shape)).astype(x.dtype)


def _vary(x: AnyFloat, axis_name: AxisName) -> AnyFloat:
    if not axes.is_tracked(axis_name):
        return x
    return axes.to_varying(x, frozenset(axes.axis_names(axis_name)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _psum(x, axis_name):
    return lax.psum(x, axis_name)


_psum.defvjp(
    lambda x, axis_name: (_psum(x, axis_name), None),
    lambda axis_name, _, ct: (_pvary(ct, axis_name),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _pvary(x, axis_name):
    return _vary(x, axis_name)


_pvary.defvjp(
    lambda x, axis_name: (_pvary(x, axis_name), None),
    lambda axis_name, _, ct: (_psum(ct, axis_name),),
)
