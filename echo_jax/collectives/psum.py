"""``echo_psum``, its conjugate ``echo_pvary``, and ``flush``."""

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
    add_to: FloatLike | None = None,
    config: EchoConfig = EchoConfig(),
) -> tuple[AnyFloat, Residual | None]:
    r"""Sum over an axis in few bits, with error feedback from call to call.

    With :math:`Q` the quantizer and :math:`w_i` and :math:`v_j` the two parts of the
    residual (the rounding errors of what rank :math:`i` sent, and of the sum that rank
    :math:`j` made), chunk :math:`j` of the result is

    .. math::
        a_i = x_i + w_i, \quad s_j = \sum_i Q(a_{ij}) + v_j, \quad y_j = Q(s_j), \quad
        w_i' = a_i - Q(a_i), \quad v_j' = s_j - Q(s_j)

    so that over any number of calls :math:`\sum y = \sum\sum_i x_i - \sum_i w_i - v`:
    only the errors of the last call remain. This helps where the outputs are added up
    unchanged, as the residual stream of a pre-norm transformer adds them. If the
    ``algorithm`` of the configuration is ``"one-shot"``, every rank adds up
    :math:`y = \sum_i Q(a_i)` itself, and :math:`v` stays as it is.

    With ``add_to``, the call returns ``add_to + y``, the stream after the sum: the pass
    that decodes :math:`y` also adds the stream, in float32, and rounds once to x's
    dtype. In float32 the result equals a separate addition bit for bit; in bfloat16 and
    float16 it saves one rounding.

    Gradient: the identity, as for ``psum``, with respect to ``x`` and to ``add_to``.
    The residual's cotangent passes through unchanged; it carries the residual of the
    backward sums, which :func:`echo_pvary` uses. Under ``check_vma=False``,
    differentiate inside the ``shard_map`` and use this pair or the exact pair of
    :mod:`echo_jax.collectives.exact` for every collective: if ``grad`` is taken
    outside, JAX scales the cotangents by ``1/N`` before they reach this function.
    Second derivatives follow the same rules; JAX refuses forward mode (``jax.jvp``).

    A sum over an axis of one rank is quantized like any other, so that the effect can
    be studied on one device; ``config.exact()`` avoids it.

    Sharding: call inside ``jax.shard_map`` or ``jax.vmap(axis_name=...)``. ``x`` varies
    along the axis. ``y`` and ``add_to`` are replicated, and typed so; ``y`` is the same
    on every rank bit for bit.

    Args:
      x: this rank's partial sum, any shape; float32, bfloat16 or float16.
      residual: from :func:`echo_jax.init_residual` or returned by the previous call.
        None for no feedback.
      axis_name: the axis, or a tuple of axes that act as one.
      add_to: what the sum is added to, usually the residual stream: replicated, of x's
        shape and dtype. None for the sum alone.
      config: format, path and backend of this call. Without ``config.feedback`` the
        residual is neither added nor changed.

    Returns:
      ``(y, residual)``: the sum in ``x``'s shape and dtype, and the new residual. Bytes
      on the wire: :func:`echo_jax.wire_bytes`; worst error:
      :func:`echo_jax.error_bound`. If ``x`` is smaller than ``config.min_bytes``, the
      call is ``lax.psum`` bit for bit and the residual is neither added nor changed; if
      the configuration itself is exact (``config.exact()``), the sum includes the
      residual, which is zero afterwards. In both cases sum and ``add_to`` are added in
      x's dtype. A block that holds a NaN or an infinity becomes NaN on every rank and
      leaves no residual.

    Raises:
      ValueError: for an unbound axis; an unsupported dtype; a residual made for another
        shape, axis or format; an ``add_to`` of another shape or dtype than ``x`` or,
        where types are tracked, one that varies along the axis; or a backend that
        cannot run.

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
    """Identity whose gradient is an :func:`echo_psum`.

    It marks where a replicated value enters computations that differ from rank to rank.
    Forward, both arguments are returned unchanged. Backward, the cotangents of the
    ranks are summed in few bits. The residual of these sums travels as the cotangent of
    ``residual`` and so passes through the layers in reverse order. Put the call on the
    residual stream, before the norm: the backward sums are then added to the gradient
    of the stream unchanged, which lets their errors cancel.

    Sharding: ``x`` is replicated over the axis; the result is typed as varying.

    Args:
      x: a replicated activation, any shape; float32, bfloat16 or float16.
      residual: the residual that the layers pass on, or None for no feedback.
      axis_name: the axis, or a tuple of axes that act as one.
      config: format, path and backend of the backward sum.

    Returns:
      ``(x, residual)``, unchanged.

    Raises:
      ValueError: as :func:`echo_psum`; and where types are tracked, if ``x`` already
        varies along the axis, because then its gradient must not be summed.

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
    """Exact psum of ``x`` plus the residuals of all ranks, which are zero afterwards.

    Use it for the last call of a network whose output must carry no rounding error. The
    sum is taken in ``x``'s dtype: in bfloat16 it has the error of any bfloat16 psum.

    Sharding and gradient: those of :func:`echo_psum`.

    Args:
      x: this rank's partial sum.
      residual: returned by the previous call; None makes this ``lax.psum``.
      axis_name: the axis, or a tuple of axes that act as one.
      config: the configuration of the earlier calls.

    Returns:
      ``(y, residual)``: the sum, and a residual of zeros.

    Raises:
      ValueError: as :func:`echo_psum`.

    Example:
        >>> y, residual = echo.flush(x, residual, "tp", config=config)
    """
    x = call.prepare("flush", x, residual, axis_name, config)
    paying = dataclasses.replace(config.exact(), feedback=True)
    return echo_psum(x, residual, axis_name, config=paying)


def _all_reduce(x, residual, axis_name, config: EchoConfig, add_to=None):
    exactly = traffic.takes_exact_path(x.shape, x.dtype, config)
    is_small = traffic.is_small(x.shape, x.dtype, config)
    paying = call.pays(residual, config, is_small=is_small)
    owed = residual if paying else None
    if exactly:
        y, owed = exact.all_reduce(x, owed, axis_name, config.format)
        y = y if add_to is None else add_to + y
    else:
        y, owed = exchange.all_reduce(x, owed, axis_name, config, add_to=add_to)
    return y, owed if paying else residual


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _echo_psum(x, residual, axis_name, config):
    return _all_reduce(x, residual, axis_name, config)


# Each gradient rule calls the other function of the pair rather than the codec. Second
# derivatives then use these rules too; through the codec they would be zero, the
# derivative of rounding.
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
