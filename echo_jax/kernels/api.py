"""The interface that all codec backends share, and the choice among them."""

import dataclasses
import functools
import importlib
from collections.abc import Callable

import jax

from echo_jax import platform
from echo_jax.config import Backend
from echo_jax.kernels import dispatch, xla
from echo_jax.wire.format import ALLOWED_BITS, WireFormat

# Widths of code that a backend's kernels support. Those that do not divide a byte are
# stored in two planes.
KERNEL_BITS = {"triton": ALLOWED_BITS, "pallas": (2, 4, 8)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
    """The stages of a quantized all-reduce that run on one device.

    ``chunks`` is the number of ranks and ``blocks`` the number of blocks in one chunk,
    ``ceil(rows * ceil(width / block_size) / chunks)``. A payload has
    ``blocks * fmt.block_bytes`` bytes. A residual is an array of the shape given below,
    a :class:`~echo_jax.wire.compact.Compact` of that shape, or None; if it is None, so
    is the residual that is returned.

    * ``send(x, residual, *, fmt, chunks, piece) -> (payloads, residual)``: adds the
      residual ``(chunks, blocks, block_size)`` to the rotated blocks of
      ``x (rows, width)``, quantizes them and packs one payload for each rank; the new
      residual is the rounding error.
    * ``reduce(payloads, residual, *, fmt, piece) -> (payload, residual)``: dequantizes
      the same chunk from each rank, adds these in rank order in float32, adds the
      residual ``(blocks, block_size)``, and quantizes the sum.
    * ``return_(payloads, *, shape, dtype, fmt, stream, piece, out) -> x``: dequantizes
      the gathered payloads, ``(ranks, chunks, payload)``, rotates back, adds the ranks
      up in their order in float32, adds ``stream`` if there is one, and casts the
      result, rows of ``shape``, to ``dtype``. Gathered sums count as one rank's.
    * ``sum_chunks(payloads, *, shape, dtype, fmt) -> x``: the sum that ``reduce``
      computes, rotated back but not quantized, for a reduce-scatter.

    With a ``piece``, a :class:`~echo_jax.wire.blocks.Piece`, a stage processes only
    that run of blocks in each chunk, and payloads hold only those blocks. ``x``,
    residuals and rows are passed whole all the same; what lies outside the piece is
    returned unchanged. The rows of earlier pieces are passed to ``return_`` as ``out``;
    without it, the rows outside the piece are undefined.
    """

    name: str
    send: Callable
    reduce: Callable
    return_: Callable
    sum_chunks: Callable


XLA = Codec(
    name="xla",
    send=xla.send,
    reduce=xla.reduce,
    return_=xla.return_,
    sum_chunks=xla.sum_chunks,
)


def get_codec(backend: Backend, fmt: WireFormat) -> Codec:
    """The codec for ``fmt`` under this choice of backend.

    Where a program is lowered for an NVIDIA GPU, ``"auto"`` uses the best kernels that
    can be compiled in this installation, Triton before Pallas; on other platforms it
    uses the definition. Its name lists both. Compiling ahead of time for a GPU that
    this machine does not have needs ``"auto"``.

    Raises:
      ValueError: if an explicitly chosen backend cannot run; another is never used
        instead.
    """
    if backend == "xla":
        return XLA
    if backend == "auto":
        name = _best_kernels()
        has_kernels = name is not None and fmt.bits in KERNEL_BITS[name]
        return _with_kernels(name, elsewhere="xla") if has_kernels else XLA
    _check_format(backend, fmt)
    _check_device(backend)
    if backend == "triton":
        _check_triton()
    return _with_kernels(backend)


@functools.cache
def _with_kernels(name: str, elsewhere: str | None = None) -> Codec:
    """A codec of the kernels in the module ``name``."""
    kernels = importlib.import_module(f"echo_jax.kernels.{name}")
    fall_back = elsewhere is not None
    return Codec(
        name=f"{name} on cuda, {elsewhere} elsewhere" if fall_back else name,
        send=functools.partial(dispatch.send, kernels, fall_back),
        reduce=functools.partial(dispatch.reduce, kernels, fall_back),
        return_=functools.partial(dispatch.return_, kernels, fall_back),
        sum_chunks=xla.sum_chunks,
    )


@functools.cache
def _best_kernels() -> str | None:
    if not platform.has_cuda_plugin():
        return None
    return "triton" if _triton_error() is None else "pallas"


@functools.cache
def _triton_error() -> ImportError | None:
    """Why the Triton kernels cannot be imported, or None if they can."""
    try:
        importlib.import_module("echo_jax.kernels.triton")
    except ImportError as error:
        return error
    return None


def _check_format(backend: str, fmt: WireFormat) -> None:
    if backend not in KERNEL_BITS:
        raise ValueError(
            f"backend={backend!r} is not known: choose 'auto', 'xla' or one of "
            f"{tuple(KERNEL_BITS)}."
        )
    if fmt.bits not in KERNEL_BITS[backend]:
        raise ValueError(
            f"backend={backend!r} has no kernels for {fmt.bits} bits, only for "
            f"{KERNEL_BITS[backend]}: use backend='auto' or 'xla', or one of those "
            "widths."
        )


def _check_device(backend: str) -> None:
    try:
        jax.local_devices(backend="cuda")
    except RuntimeError as error:
        raise ValueError(
            f"backend={backend!r} needs an NVIDIA GPU, and JAX sees none here: use "
            "backend='auto', which also compiles ahead for a GPU elsewhere, or 'xla'."
        ) from error


def _check_triton() -> None:
    error = _triton_error()
    if error is not None:
        raise ValueError(
            f"backend='triton' cannot be imported ({error}): install the extra "
            "echo_jax[triton] beside JAX's CUDA plugin, or use backend='auto'."
        ) from error
