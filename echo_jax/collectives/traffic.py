"""Which path a call takes, and how many bytes it puts on the wire.

Both follow from static shapes and the configuration alone, never from timing.
"""

import dataclasses
import math
from numbers import Integral
from typing import Literal, get_args

import jax.numpy as jnp

from echo_jax.config import EchoConfig
from echo_jax.kernels import get_codec
from echo_jax.residual import Verb, check_scatter, scatter_shape
from echo_jax.typing import Shape
from echo_jax.wire import blocks as blocking

CallPath = Literal["echo", "exact"]

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a call does and why. ``str()`` says it in two sentences."""

    path: CallPath  # "echo": through the codec; "exact": a full-width collective
    reason: str  # why this path
    backend: str | None  # what runs the codec; None on the exact path
    x_bytes: int  # bytes of the rank's x
    wire_bytes: dict[str, int]  # bytes that the rank sends, by collective
    exact_bytes: int  # bytes that the rank would send on the exact path

    @property
    def ratio(self) -> float:
        """Bytes sent, relative to the exact path; 1.0 where nothing is sent."""
        sent = sum(self.wire_bytes.values())
        return sent / self.exact_bytes if self.exact_bytes else 1.0

    def __str__(self) -> str:
        sent = ", ".join(f"{op} {n:,} B" for op, n in self.wire_bytes.items())
        backend = f" on the {self.backend} backend" if self.backend else ""
        return (
            f"{self.path}{backend}: {self.reason}. Sends {sent} a rank, "
            f"{self.ratio:.3f} of the exact {self.exact_bytes:,} B."
        )


def x_bytes(shape: Shape, dtype) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def takes_exact_path(shape: Shape, dtype, config: EchoConfig) -> bool:
    """Whether a call on a tensor of this shape is exact.

    For ``psum_scatter``, the shape is that of the parts: see ``scatter_shape``.
    """
    return _exact_reason(shape, dtype, config) is not None


def is_small(shape: Shape, dtype, config: EchoConfig) -> bool:
    """Whether ``min_bytes`` alone makes a call on a tensor of this shape exact."""
    return not config.is_exact and x_bytes(shape, dtype) < config.least_bytes


def _exact_reason(shape: Shape, dtype, config: EchoConfig) -> str | None:
    """Why a call is exact; None if it goes through the codec."""
    size = x_bytes(shape, dtype)
    if config.is_exact:
        return "this call is configured to be exact"
    if size == 0:
        return "x is empty"
    if is_small(shape, dtype, config):
        return f"x has {size:,} B, under {_min_bytes(config)}"
    blocks = blocking.num_blocks(shape, config.format.block_size)
    payload = blocks * config.format.block_bytes
    if config.least_bytes and payload >= size:
        return (
            f"blocks run along the last axis, and padding them would turn the "
            f"{size:,} B of x into {payload:,} B: let the last axis, of a rank's part "
            f"in a psum_scatter, fill a block of {config.format.block_size} values"
        )
    return None


def _min_bytes(config: EchoConfig) -> str:
    where = f" ({config.min_bytes})" if config.min_bytes == "auto" else ""
    return f"min_bytes={config.least_bytes:,}{where}"


def wire_bytes(
    shape: Shape,
    axis_size: int,
    config: EchoConfig = EchoConfig(),
    *,
    dtype="bfloat16",
    verb: Verb = "psum",
    scatter_dimension: int = 0,
    tiled: bool = True,
) -> dict[str, int]:
    """Exact number of bytes that one rank sends to others in one call, by collective.

    Scales and padding are counted; the part that a rank keeps for itself is not. For a
    call on the exact path, the count is that of a bandwidth-optimal (ring) collective.

    Args:
      shape: shape of the rank's ``x``.
      axis_size: number of ranks ``N``.
      config: the configuration of the call.
      dtype: dtype of ``x``; with the shape it decides which path the call takes, and
        how many bytes the exact path sends.
      verb: the collective: ``"psum"`` (also the backward pass of ``echo_pvary``),
        ``"psum_scatter"`` or ``"all_gather"``.
      scatter_dimension: of ``psum_scatter``.
      tiled: of ``psum_scatter``.

    Returns:
      A dict such as ``{"all_to_all": 1904, "all_gather": 1904}``, or
      ``{"all_gather": 15232}`` in one shot, or ``{"all_reduce": 7168}``.

    Raises:
      ValueError: if ``axis_size`` is not at least 1, the dtype is not supported, the
        verb is not known, or the scattered dimension does not divide.

    Example:
        >>> wire_bytes((8, 64), 8, EchoConfig(min_bytes=0))
        {'all_to_all': 238, 'all_gather': 238}
    """
    shape = _checked(shape, dtype, axis_size, config, verb)
    if verb == "psum_scatter":
        shape = _parts(shape, axis_size, scatter_dimension, tiled=tiled)
    if takes_exact_path(shape, dtype, config):
        return _exact_wire_bytes(shape, dtype, axis_size, verb)
    fmt, others = config.format, axis_size - 1
    if verb == "all_gather":
        blocks = blocking.num_blocks(shape, fmt.block_size)
        return {"all_gather": others * blocks * fmt.block_bytes}
    blocks = blocking.blocks_per_chunk(shape, fmt.block_size, axis_size)
    sent = others * blocks * fmt.block_bytes
    if verb == "psum_scatter":
        return {"all_to_all": sent}
    if config.algorithm == "one-shot":
        return {"all_gather": axis_size * sent}
    return {"all_to_all": sent, "all_gather": sent}


def explain(
    shape: Shape,
    dtype,
    axis_size: int,
    config: EchoConfig = EchoConfig(),
    *,
    verb: Verb = "psum",
    scatter_dimension: int = 0,
    tiled: bool = True,
) -> Explanation:
    """Says which path a call takes and why, and what it sends.

    Args:
      shape: shape of the rank's ``x``.
      dtype: dtype of ``x``.
      axis_size: number of ranks.
      config: the configuration of the call.
      verb: the collective, as in :func:`wire_bytes`.
      scatter_dimension: of ``psum_scatter``.
      tiled: of ``psum_scatter``.

    Returns:
      An :class:`Explanation`; print it, or read its fields.

    Raises:
      ValueError: as :func:`wire_bytes`; and if the configured backend cannot run.

    Example:
        >>> explain((1, 4096), "bfloat16", 8).path
        'exact'
    """
    shape = _checked(shape, dtype, axis_size, config, verb)
    size, laid_out = x_bytes(shape, dtype), shape
    if verb == "psum_scatter":
        laid_out = _parts(shape, axis_size, scatter_dimension, tiled=tiled)
    reason, backend = _exact_reason(laid_out, dtype, config), None
    path: CallPath = "exact" if reason else "echo"
    if reason is None:
        reason = f"x has {size:,} B, at least {_min_bytes(config)}"
        backend = get_codec(config.backend, config.format).name
    return Explanation(
        path=path,
        reason=reason,
        backend=backend,
        x_bytes=size,
        wire_bytes=wire_bytes(
            shape,
            axis_size,
            config,
            dtype=dtype,
            verb=verb,
            scatter_dimension=scatter_dimension,
            tiled=tiled,
        ),
        exact_bytes=sum(_exact_wire_bytes(shape, dtype, axis_size, verb).values()),
    )


def check_dtype(dtype) -> None:
    """Refuses a dtype that the collectives do not carry.

    Raises:
      ValueError: naming what is accepted and the exact twin for the rest.
    """
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in SUPPORTED_DTYPES:
        raise ValueError(
            f"dtype {name} is not supported: echo_jax carries "
            f"{', '.join(SUPPORTED_DTYPES)}. Cast x first, or use the collective of "
            "jax.lax, which is exact for integers and float64."
        )


def _checked(shape, dtype, axis_size: int, config, verb: str) -> Shape:
    check_dtype(dtype)
    if not isinstance(config, EchoConfig):
        raise TypeError(
            f"config must be an EchoConfig, got {type(config).__name__}: write "
            "EchoConfig(format=WireFormat(...))."
        )
    if verb not in get_args(Verb):
        raise ValueError(f"verb={verb!r} is not known: choose one of {get_args(Verb)}.")
    if not isinstance(shape, tuple | list):
        raise TypeError(
            f"shape must be a tuple, got {type(shape).__name__}: give that of one "
            "rank's x, as x.shape."
        )
    if not all(isinstance(n, Integral) and int(n) >= 0 for n in shape):
        raise ValueError(f"shape={shape!r} must hold integers of at least 0.")
    if not isinstance(axis_size, Integral) or int(axis_size) < 1:
        raise ValueError(f"axis_size={axis_size!r} must be an int of at least 1.")
    return tuple(shape)


def _parts(shape: Shape, axis_size: int, dimension: int, *, tiled: bool) -> Shape:
    """The shape of a ``psum_scatter``'s parts, checked."""
    check_scatter(shape, axis_size, dimension, tiled=tiled)
    return scatter_shape(shape, axis_size, dimension, tiled=tiled)


def _exact_wire_bytes(shape: Shape, dtype, axis_size: int, verb: Verb):
    """Bytes of a ring: in each of ``N - 1`` steps a rank sends ``1/N`` of the tensor.

    An all-reduce makes two such rounds; an all-gather moves ``N`` tensors of this size.
    """
    size, others = x_bytes(shape, dtype), axis_size - 1
    if verb == "all_gather":
        return {"all_gather": others * size}
    scattered = others * -(-size // axis_size)
    if verb == "psum_scatter":
        return {"psum_scatter": scattered}
    return {"all_reduce": 2 * scattered}
