"""The one interface that every codec backend has, and the choice among them."""

import dataclasses
import functools
import importlib
from collections.abc import Callable

import jax

from echo_jax import platform
from echo_jax.config import Backend
from echo_jax.kernels import dispatch, xla
from echo_jax.wire.format import WireFormat

# Formats whose codes fill whole bytes slot by slot; the others take two planes.
KERNEL_BITS = (2, 4, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec:
    """The stages of a two-shot all-reduce that run on one device.

    ``chunks`` is the number of ranks, ``blocks`` the blocks of one chunk:
    ``ceil(rows * ceil(width / block_size) / chunks)``. A payload has
    ``blocks * fmt.block_bytes`` bytes. A residual is an array of the shape given, a
    :class:`~echo_jax.wire.compact.Compact` of it, or None; without one, None is
    returned for it.

    * ``send(x, residual, *, fmt, chunks, piece) -> (payloads, residual)``: adds the
      residual ``(chunks, blocks, block_size)`` to the rotated blocks of
      ``x (rows, width)``, quantizes and packs one payload for each rank; the new
      residual is what was left out.
    * ``reduce(payloads, residual, *, fmt, piece) -> (payload, residual)``: dequantizes
      one chunk of each rank, adds them in rank order in float32, then the residual
      ``(blocks, block_size)``, and quantizes the sum.
    * ``return_(payloads, *, shape, dtype, fmt, stream, piece, out) -> x``: dequantizes
      the gathered payloads, rotates back, adds ``stream`` if there is one, in float32,
      and casts, to rows of ``shape``.
    * ``sum_chunks(payloads, *, shape, dtype, fmt) -> x``: the sum of ``reduce`` handed
      out in full precision instead, for a reduce-scatter.

    With a ``piece``, a :class:`~echo_jax.wire.blocks.Piece`, a stage does its work for
    that run of each chunk's blocks alone, and payloads hold no other. Arrays in which a
    piece has its place (``x``, residuals, rows) stay whole: what is not the piece's
    comes out as it went in. The rows of earlier pieces go into ``return_`` as ``out``;
    without them the rest of the rows is undefined.
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
    """The codec that runs ``fmt`` under this choice of backend.

    ``"auto"`` takes the best kernels that can be compiled here, Triton before Pallas,
    wherever a program is lowered for an NVIDIA GPU, and the definition elsewhere; its
    name says both. Compiling ahead for a GPU that is not here needs ``"auto"``.

    Raises:
      ValueError: if an explicitly chosen backend cannot run. Never falls back from an
        explicit choice.
    """
    if backend == "xla":
        return XLA
    if backend == "auto":
        name = _best_kernels() if fmt.bits in KERNEL_BITS else None
        return _with_kernels(name, elsewhere="xla") if name else XLA
    _check_format(backend, fmt)
    _check_device(backend)
    if backend == "triton":
        _check_triton()
    return _with_kernels(backend)


@functools.cache
def _with_kernels(name: str, elsewhere: str | None = None) -> Codec:
    """A codec of the kernels in the module of that name."""
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
    if fmt.bits not in KERNEL_BITS:
        raise ValueError(
            f"backend={backend!r} has no kernels for {fmt.bits} bits, only for "
            f"{KERNEL_BITS}: use backend='auto' or 'xla', or one of those widths."
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
