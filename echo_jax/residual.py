"""The residual: rounding errors of earlier calls that the next call adds back."""

import dataclasses
import functools
from collections.abc import Hashable
from numbers import Integral
from typing import Any, Literal

import jax
import jax.numpy as jnp

from echo_jax import axes
from echo_jax.config import EchoConfig
from echo_jax.typing import AnyFloat, AxisName, FloatLike, Shape
from echo_jax.wire import blocks as blocking
from echo_jax.wire import compact
from echo_jax.wire.compact import Compact, Nibbles

Verb = Literal["psum", "psum_scatter", "all_gather"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Which calls a residual belongs to. Static: part of the pytree's structure."""

    rows: int  # of the tensor, flattened to its last axis
    width: int  # length of that axis
    chunks: int  # ranks on the axis
    blocks: int  # blocks in the chunk of one rank
    block_size: int  # values in a block
    rotate: bool  # whether block coordinates are rotated
    axis_names: tuple[Hashable, ...]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("send", "reduce"),
    meta_fields=("layout",),
)
@dataclasses.dataclass(frozen=True, eq=False)  # arrays have no single truth value
class Residual:
    """One rank's rounding errors so far, in block coordinates and padded to blocks.

    The residual is what a rank *owes*: what rounding took from earlier sums, and what
    the next call adds back. Its contents are opaque: make it with
    :func:`init_residual`, pass it from call to call, and settle it with
    :func:`echo_jax.flush`. It is a pytree of float arrays that differ from rank to
    rank, so that it can be a scan carry, its own cotangent, or part of a checkpoint.

    Each call must take the residual that the previous call returned; one that is passed
    to two calls is added twice. Its cotangent carries the residual of the backward sums
    and is not a gradient: keep it out of optimizers. To keep a residual across jitted
    steps, pass it through ``shard_map`` with the prefix spec
    ``PartitionSpec(axis_name)`` in ``in_specs`` and ``out_specs``.
    """

    # Typed as Any because transformations put leaves of their own into a pytree:
    # stacked arrays, partition specs, placeholders.
    send: Any  # SendResidual, w: rounding error of this rank's own partial sums
    reduce: Any  # ReduceResidual, v: rounding error of the chunk that this rank sums
    layout: Layout


def init_residual(
    x: FloatLike | jax.ShapeDtypeStruct | Shape,
    axis_name: AxisName,
    *,
    config: EchoConfig = EchoConfig(),
    scatter_dimension: int | None = None,
    tiled: bool = True,
) -> Residual | None:
    """A residual of zeros, for calls on tensors like ``x``.

    Sharding: call inside ``shard_map`` or ``vmap``; each rank has its own residual.

    Args:
      x: a rank's tensor, or its shape. Under ``check_vma=True`` on a mesh with more
        axes pass the tensor itself: the residual then varies along the same axes as
        the tensor, without which JAX reports that the types of a scan carry differ.
      axis_name: the axis (or axes) of the calls.
      config: the configuration of the calls: block size, rotation, residual dtype.
      scatter_dimension: only for ``echo_psum_scatter`` along the last dimension, where
        blocks start anew in the part of every rank.
      tiled: of ``echo_psum_scatter``, if ``scatter_dimension`` is given.

    Returns:
      A :class:`Residual` of zeros. It holds about ``(1 + 1/N)`` times as many values
      as ``x``, in ``config.residual_dtype``. None if ``config.feedback`` is off.

    Raises:
      ValueError: if the axis is not bound, or the dimension cannot be scattered.
      TypeError: if ``x`` is neither an array nor a shape.

    Example:
        >>> residual = echo.init_residual(x, "tp", config=config)
        >>> y, residual = echo.echo_psum(x, residual, "tp", config=config)
    """
    if not isinstance(config, EchoConfig):
        raise TypeError(
            f"init_residual: config must be an EchoConfig, got {type(config).__name__}."
        )
    shape = _shape_of(x)
    vary = axes.varying_axes(x) if isinstance(x, jax.Array) else frozenset()
    # Before the return without feedback: an unbound axis is an error there too.
    size = axes.axis_size(axis_name)
    if scatter_dimension is not None:
        check_scatter(shape, size, scatter_dimension, tiled=tiled)
    if not config.feedback:
        return None
    if scatter_dimension is not None:
        shape = scatter_shape(shape, size, scatter_dimension, tiled=tiled)
    layout = make_layout(shape, axis_name, config)
    if axes.is_tracked(axis_name):
        vary = vary | frozenset(axes.axis_names(axis_name))
    send_shape, reduce_shape = _array_shapes(layout)
    residual = Residual(
        send=_zeros(send_shape, config),
        reduce=_zeros(reduce_shape, config),
        layout=layout,
    )
    return jax.tree.map(lambda leaf: axes.to_varying(leaf, vary), residual)


def make_layout(shape: Shape, axis_name: AxisName, config: EchoConfig) -> Layout:
    """The layout of a residual for calls on tensors of this shape."""
    fmt, size = config.format, axes.axis_size(axis_name)
    rows, width = blocking.row_shape(shape)
    return Layout(
        rows=rows,
        width=width,
        chunks=size,
        blocks=blocking.blocks_per_chunk(shape, fmt.block_size, size),
        block_size=fmt.block_size,
        rotate=fmt.rotate,
        axis_names=axes.axis_names(axis_name),
    )


def scatter_shape(shape: Shape, size: int, dimension: int, *, tiled: bool) -> Shape:
    """The shape with ``dimension`` cut into one part for each rank, parts leading.

    A part that is a single number is one of one axis: no block may span two parts.
    """
    dimension %= len(shape)
    kept = (shape[dimension] // size,) if tiled else ()
    part = (*shape[:dimension], *kept, *shape[dimension + 1 :])
    return (size, *(part or (1,)))


def check_scatter(shape: Shape, size: int, dimension: int, *, tiled: bool) -> None:
    """Refuses a dimension that cannot be scattered over ``size`` ranks.

    Raises:
      ValueError: with the sizes and what is needed.
    """
    if not -len(shape) <= dimension < len(shape):
        raise ValueError(
            f"scatter_dimension={dimension} is out of range for x of shape {shape}."
        )
    length = shape[dimension]
    if tiled and length % size:
        raise ValueError(
            f"dimension {dimension} of x has {length} entries, which {size} ranks do "
            f"not divide: pad it to {-(-length // size) * size}."
        )
    if not tiled and length != size:
        raise ValueError(
            f"dimension {dimension} of x has {length} entries; with tiled=False it "
            f"must have one for each of the {size} ranks. Did you mean tiled=True?"
        )


def check_residual(
    residual: Residual | None, shape: Shape, axis_name: AxisName, config: EchoConfig
) -> None:
    """Refuses a residual that was made for calls of another kind.

    Raises:
      ValueError: names what differs, and shows wrong code beside right code.
    """
    if residual is None:
        return
    wanted = make_layout(shape, axis_name, config)
    send_shape, reduce_shape = _array_shapes(wanted)
    given = {
        "(rows, width)": (residual.layout.rows, residual.layout.width),
        "axis names": residual.layout.axis_names,
        "block_size": residual.layout.block_size,
        "rotate": residual.layout.rotate,
        "send shape": tuple(residual.send.shape),
        "reduce shape": tuple(residual.reduce.shape),
        "send dtype": dtype_name(residual.send),
        "reduce dtype": dtype_name(residual.reduce),
    }
    needed = {
        "(rows, width)": (wanted.rows, wanted.width),
        "axis names": wanted.axis_names,
        "block_size": wanted.block_size,
        "rotate": wanted.rotate,
        "send shape": send_shape,
        "reduce shape": reduce_shape,
        "send dtype": config.residual_dtype,
        "reduce dtype": config.residual_dtype,
    }
    wrong = [
        f"  {key}: the residual has {given[key]!r}, this call needs {needed[key]!r}"
        for key in needed
        if given[key] != needed[key]
    ]
    if wrong:
        raise ValueError(
            f"The residual does not belong to this call on a tensor of shape {shape} "
            f"over axis {axis_name!r}:\n" + "\n".join(wrong) + "\n"
            "A residual serves calls of one shape, axis, block size, rotation and "
            "residual_dtype; bits may change from call to call.\n"
            "  wrong:  echo_psum(x, residual_of_another_tensor, axis_name, ...)\n"
            "  right:  residual = init_residual(x, axis_name, config=config)\n"
            "          y, residual = echo_psum(x, residual, axis_name, config=config)\n"
            "For echo_psum_scatter along the last dimension give init_residual the "
            "scatter_dimension too."
        )


def zeros_like(residual: Residual) -> Residual:
    """A residual of zeros with the layout and dtypes of this one."""
    return jax.tree.map(jnp.zeros_like, residual)


def norms(residual: Residual) -> dict[str, jax.Array]:
    """Root mean square of this rank's residual: a float32 scalar for each stage."""
    return {
        "send": _rms(residual.send),
        "reduce": _rms(residual.reduce),
    }


def dtype_name(part: AnyFloat | Compact) -> str:
    """The ``residual_dtype`` that one part of a residual was made with."""
    if isinstance(part, Compact):
        return "int4" if isinstance(part, Nibbles) else "int8"
    return part.dtype.name


def _rms(part: AnyFloat | Compact) -> jax.Array:
    values = compact.expand(part)
    # Not the mean, which of no values is NaN: an empty tensor owes nothing.
    return jnp.sqrt(jnp.sum(jnp.square(values)) / max(1, values.size))


def _zeros(shape: Shape, config: EchoConfig) -> AnyFloat | Compact:
    kind = {"int8": Compact, "int4": Nibbles}.get(config.residual_dtype)
    if kind is not None:
        return compact.zeros(shape, kind)
    return jnp.zeros(shape, config.residual_dtype)


def _shape_of(x) -> Shape:
    """The shape of an array, or the shape itself."""
    if isinstance(x, float):
        return ()
    shape = x if isinstance(x, tuple | list) else getattr(x, "shape", None)
    if shape is None or not all(isinstance(n, Integral) and int(n) >= 0 for n in shape):
        raise TypeError(
            f"init_residual: x must be one array or its shape, got {type(x).__name__}. "
            "Each tensor has a residual of its own: call once for each leaf."
        )
    return tuple(shape)


def _array_shapes(layout: Layout) -> tuple[Shape, Shape]:
    reduce = (layout.blocks, layout.block_size)
    return (layout.chunks, *reduce), reduce
