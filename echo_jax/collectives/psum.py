"""``echo_psum`` and its mirror ``echo_pvary``."""

import dataclasses
import functools

import jax

from echo_jax import axes
from echo_jax.collectives import call, exact, exchange, traffic
from echo_jax.config import EchoConfig
from echo_jax.residual import Residual, check_residual
from echo_jax.typing import AnyFloat, AxisName, FloatLike


def echo_psum(
    x: FloatLike,
    residual: Residual | None,
    axis_name: AxisName,
    *,
    add_to: AnyFloat | None = None,
    config: EchoConfig = EchoConfig(),
) -> tuple[AnyFloat, Residual | None]:
    r"""Sum over an axis in few bits, repaying what earlier calls rounded away.

    With :math:`Q` the codec, :math:`w_i` and :math:`v_j` the two parts of the residual,
    chunk :math:`j` of the result is

    .. math::
        a_i = x_i + w_i, \quad s_j = \sum_i Q(a_{ij}) + v_j, \quad y_j = Q(s_j), \quad
        w_i' = a_i - Q(a_i), \quad v_j' = s_j - Q(s_j)

    so that over any number of calls :math:`\sum y = \sum\sum_i x_i - \sum_i w_i - v`:
    only the newest error stands. This holds where the outputs are added up unchanged,
    as the residual stream of a pre-norm transformer does. With ``add_to`` the call
    returns the stream after it, ``add_to + y``: the pass that decodes :math:`y` adds
    them, in float32, and rounds once to x's dtype. In float32 that is bit for bit the
    sum taken afterwards; in bfloat16 and float16 it is one rounding less.

    Gradient: that of ``psum``, the identity, and so for ``add_to``; the residual's
    cotangent passes through untouched, to be used by :func:`echo_pvary`. Under
    ``check_vma=False`` differentiate inside the ``shard_map`` and use this pair or the
    exact pair of :mod:`echo_jax.collectives.exact` for every collective: JAX scales the
    cotangents of a ``grad`` taken outside by ``1/N``, before they can be seen here.
    Second derivatives take the same rules; forward mode (``jax.jvp``) is refused by
    JAX.

    An axis of one rank is rounded like any other, so that one device can show what
    many would do; ``config.exact()`` leaves it out.

    Sharding: inside ``jax.shard_map`` or ``jax.vmap(axis_name=...)``. ``x`` varies
    along the axis; ``y`` is the same on every rank, bit for bit, and typed so. So is
    ``add_to``.

    Args:
      x: this rank's partial sum, any shape; float32, bfloat16 or float16.
      residual: from :func:`echo_jax.init_residual` or the call before. None for no
        feedback.
      axis_name: the axis, or a tuple of axes that act as one.
      add_to: what the sum is added to, of x's shape and dtype and the same on every
        rank: the residual stream. None for the sum alone.
      config: format, path and backend of this call. Without ``config.feedback`` the
        residual passes by unpaid and unchanged.

    Returns:
      ``(y, residual)``: the sum in ``x``'s shape and dtype, and what is owed now. Bytes
      on the wire: :func:`echo_jax.wire_bytes`; worst error:
      :func:`echo_jax.error_bound`. A call smaller than ``config.min_bytes`` is exact
      and pays the residual; the sum then arrives in x's dtype and is added there. A
      block with a NaN or an infinity becomes NaN on every rank and owes nothing.

    Raises:
      ValueError: for an unbound axis, an unsupported dtype, a residual of another
        call, an ``add_to`` that does not fit ``x`` or, where types are tracked, varies
        along the axis, or a backend that cannot run.

    Example:
        >>> def layer(h, w_in, w_out, residual):  # inside shard_map over "tp"
        ...     h, residual = echo.echo_pvary(h, residual, "tp", config=config)
        ...     x = jax.nn.silu(h @ w_in) @ w_out
        ...     return echo.echo_psum(x, residual, "tp", add_to=h, config=config)

    Source: "Echo: Error-Compensated 4-Bit Tensor-Parallel Communication for LLM
    Training and Inference", arXiv 2610.14277, 2026.
    """
    x = call.prepare("echo_psum", x, residual, axis_name, config)
    check_residual(residual, x.shape, axis_name, config)
    if add_to is None:
        x, residual = call.unify(x, residual, axis_name, invariant=False)
        y, residual = _echo_psum(x, residual, axis_name, config)
    else:
        add_to = call.check_add_to(add_to, x, axis_name)
        x, residual, add_to = call.unify_all(x, residual, add_to, axis_name)
        y, residual = _echo_psum_onto(x, residual, add_to, axis_name, config)
    return call.name_outputs(y, residual, "echo_psum")


def echo_pvary(
    x: FloatLike,
    residual: Residual | None,
    axis_name: AxisName,
    *,
    config: EchoConfig = EchoConfig(),
) -> tuple[AnyFloat, Residual | None]:
    """Identity whose gradient is an :func:`echo_psum`: where ranks part ways.

    Forward, both arguments pass. Backward, the cotangents of the ranks are summed in
    few bits; the residual of that sum is the cotangent of ``residual``, which thereby
    flows through the layers in reverse, a second error channel in the same value. Put
    the call on the residual stream, before the norm: the gradient stream then adds the
    sums up unchanged, and errors cancel.

    Sharding: ``x`` is the same on every rank of the axis; the result varies along it.

    Args:
      x: a replicated activation, any shape; float32, bfloat16 or float16.
      residual: the residual carried by the layers, or None.
      axis_name: the axis, or a tuple of axes that act as one.
      config: format, path and backend of the backward sum.

    Returns:
      ``(x, residual)``, unchanged.

    Raises:
      ValueError: as :func:`echo_psum`; and where types are tracked, if ``x`` already
        varies along the axis, because its gradient must not be summed then.

    Example:
        See :func:`echo_psum`.

    Source: the conjugate operators f and g of Shoeybi et al., "Megatron-LM: Training
    Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
    """
    x = call.prepare("echo_pvary", x, residual, axis_name, config)
    axes.check_invariant("echo_pvary", x, axis_name)
    check_residual(residual, x.shape, axis_name, config)
    x, residual = call.unify(x, residual, axis_name, invariant=True)
    return _echo_pvary(x, residual, axis_name, config)


def flush(
    x: FloatLike,
    residual: Residual | None,
    axis_name: AxisName,
    *,
    config: EchoConfig = EchoConfig(),
) -> tuple[AnyFloat, Residual | None]:
    """Exact psum of ``x`` and of everything owed; the residual is zero afterwards.

    The last call of a network, when it must leave no error behind; also what
    :func:`echo_psum` does below ``config.min_bytes``. The sum runs in ``x``'s dtype: in
    bfloat16 it has the error of any bfloat16 psum.

    Sharding and gradient: those of :func:`echo_psum`.

    Args:
      x: this rank's partial sum.
      residual: what is owed, or None (then this is ``lax.psum``).
      axis_name: the axis, or a tuple of axes that act as one.
      config: the configuration of the calls before.

    Returns:
      ``(y, residual)``, the residual zero.

    Raises:
      ValueError: as :func:`echo_psum`.

    Example:
        >>> y, residual = echo.flush(x, residual, "tp", config=config)
    """
    paying = dataclasses.replace(config.exact(), feedback=True)
    return echo_psum(x, residual, axis_name, config=paying)


def _all_reduce(x, residual, axis_name, config: EchoConfig, add_to=None):
    paying = call.feeds_back(residual, config)
    owed = residual if paying else None
    if traffic.takes_exact_path(x.shape, x.dtype, config):
        y, owed = exact.all_reduce(x, owed, axis_name, config.format)
        y = y if add_to is None else add_to + y
    else:
        y, owed = exchange.all_reduce(x, owed, axis_name, config, add_to=add_to)
    return y, owed if paying else residual


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _echo_psum(x, residual, axis_name, config):
    return _all_reduce(x, residual, axis_name, config)


# Each rule calls the other of the pair, never the codec itself: second derivatives then
# meet these rules again, and not the derivative of a rounding, which is zero.
def _echo_psum_fwd(x, residual, axis_name, config):
    return _echo_psum(x, residual, axis_name, config), None


def _echo_psum_bwd(axis_name, config, _, cotangents):
    y_bar, residual_bar = cotangents
    return _echo_pvary(y_bar, residual_bar, axis_name, config)


_echo_psum.defvjp(_echo_psum_fwd, _echo_psum_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _echo_psum_onto(x, residual, add_to, axis_name, config):
    return _all_reduce(x, residual, axis_name, config, add_to)


def _echo_psum_onto_fwd(x, residual, add_to, axis_name, config):
    return _echo_psum_onto(x, residual, add_to, axis_name, config), None


def _echo_psum_onto_bwd(axis_name, config, _, cotangents):
    x_bar, residual_bar = _echo_psum_bwd(axis_name, config, None, cotangents)
    return x_bar, residual_bar, cotangents[0]


_echo_psum_onto.defvjp(_echo_psum_onto_fwd, _echo_psum_onto_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _echo_pvary(x, residual, axis_name, config):
    if axes.is_tracked(axis_name):
        x = axes.to_varying(x, frozenset(axes.axis_names(axis_name)))
    return x, residual


def _echo_pvary_fwd(x, residual, axis_name, config):
    return _echo_pvary(x, residual, axis_name, config), None


def _echo_pvary_bwd(axis_name, config, _, cotangents):
    x_bar, residual_bar = cotangents
    return _echo_psum(x_bar, residual_bar, axis_name, config)


_echo_pvary.defvjp(_echo_pvary_fwd, _echo_pvary_bwd)
