"""Axis names and manual types: which ranks a value differs on.

Under ``jax.shard_map(check_vma=True)`` every value is typed with the axes along which
it varies. Under ``check_vma=False`` and ``jax.vmap(axis_name=...)`` nothing is tracked
and the functions here return their input. Whatever differs between JAX versions belongs
in this module.
"""

from collections.abc import Hashable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from echo_jax.typing import AnyFloat, AxisName


def axis_names(axis_name: AxisName) -> tuple[Hashable, ...]:
    """The axis name, or several, as a tuple."""
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def axis_size(axis_name: AxisName) -> int:
    """Number of ranks along the axis.

    Raises:
      ValueError: outside a ``shard_map`` or ``vmap`` that binds the axis; for no axis,
        or the same one twice.
      TypeError: if it is not an axis name or a tuple of them.
    """
    names = axis_names(axis_name)
    if not all(map(_is_name, names)):
        raise TypeError(
            "axis_name must be an axis name or a tuple of them, got "
            f"{type(axis_name).__name__}; the arguments of a call are (x, residual, "
            "axis_name)."
        )
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"axis_name={axis_name!r} must name at least one axis, and none twice."
        )
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"axis {axis_name!r} is not bound here: call inside jax.shard_map over a "
            "mesh that has this axis, or inside jax.vmap(..., axis_name=...). Of "
            "simulated ranks, take gradients inside the vmap too."
        ) from error


def _is_name(name) -> bool:
    """Whether JAX could take this for a name; an int is a dimension of the array."""
    try:
        hash(name)
    except TypeError:
        return False
    return not isinstance(name, int)


def is_tracked(axis_name: AxisName) -> bool:
    """Whether types say along which ranks a value varies: ``check_vma=True``.

    Raises:
      ValueError: for a tuple of which only a part is tracked.
    """
    names = frozenset(axis_names(axis_name))
    tracked = varying_axes(lax.axis_index(axis_name)) & names
    if tracked and tracked != names:
        raise ValueError(
            f"axis_name={axis_name!r} mixes axes of a shard_map and of a vmap: call "
            "once for each kind."
        )
    return bool(tracked)


def varying_axes(x: jax.Array) -> frozenset[Hashable]:
    """The axes along which the type says that ``x`` varies."""
    return jax.typeof(x).manual_axis_type.varying


def to_varying(x: jax.Array, axes: frozenset[Hashable]) -> jax.Array:
    """Types ``x`` as varying along ``axes`` too. Its transpose is an exact psum."""
    missing = tuple(sorted(axes - varying_axes(x), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x


def all_gather(
    x: jax.Array,
    axis_name: AxisName,
    *,
    axis: int = 0,
    tiled: bool = False,
    to: Literal["varying", "invarying"] = "varying",
) -> jax.Array:
    """``lax.all_gather``, also over several axes of ``vmap``."""
    if _has_a_rule(axis_name):
        return lax.all_gather(x, axis_name, axis=axis, tiled=tiled, to=to)
    x = x if tiled else jnp.expand_dims(x, axis)
    for name in reversed(axis_names(axis_name)):  # the first name counts slowest
        x = lax.all_gather(x, name, axis=axis, tiled=True)
    return x


def psum_scatter(
    x: jax.Array, axis_name: AxisName, *, axis: int = 0, tiled: bool = False
) -> jax.Array:
    """``lax.psum_scatter``, also over several axes of ``vmap``."""
    if _has_a_rule(axis_name):
        return lax.psum_scatter(x, axis_name, scatter_dimension=axis, tiled=tiled)
    for name in axis_names(axis_name):
        x = lax.psum_scatter(x, name, scatter_dimension=axis, tiled=True)
    return x if tiled else jnp.squeeze(x, axis)


def _has_a_rule(axis_name: AxisName) -> bool:
    """Whether JAX gathers and scatters over it: one axis, or several of a mesh."""
    names = axis_names(axis_name)
    of_mesh = set(jax.sharding.get_abstract_mesh().axis_names)
    return len(names) == 1 or set(names) <= of_mesh


def in_turn(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays; what takes one of them waits, on a GPU, until all are computed.

    XLA orders the operations for a GPU when it compiles and does not know how long our
    kernels take. On CPUs whatever is ready runs, and an order would only delay it.
    """
    # Before JAX 0.11 a barrier types all of its results as varying alike.
    if jax.__version_info__ < (0, 11) and len(set(map(varying_axes, arrays))) > 1:
        return arrays
    return lax.platform_dependent(
        *arrays,
        cuda=lambda *arrays: tuple(lax.optimization_barrier(arrays)),
        default=lambda *arrays: arrays,
    )


def after(x: jax.Array, other: jax.Array) -> jax.Array:
    """``x``; what takes it waits, on a GPU, until ``other`` is computed as well.

    ``x`` varies along all axes that ``other`` varies along.
    """
    return in_turn(x, to_varying(other, varying_axes(x)))[0]


def check_invariant(verb: str, x: AnyFloat, axis_name: AxisName) -> None:
    """Refuses a value that already varies along the axis.

    Raises:
      ValueError: with the wrong code beside the right one.
    """
    already = varying_axes(x) & frozenset(axis_names(axis_name))
    if already:
        raise ValueError(
            f"{verb}: x already varies along {sorted(map(str, already))}, so its "
            "gradient must not be summed over them.\n"
            f"  wrong:  {verb}(partial_sum, ...)\n"
            f"  right:  {verb}(stream, ...), with the stream the output of echo_psum "
            "or an input with in_specs=P()"
        )
