"""The calling side of the Triton kernels, by jax-triton.

Every array has a leading batch axis, see :mod:`echo_jax.kernels.dispatch`. The import
fails where jax-triton or its CUDA plugin is missing;
:func:`echo_jax.kernels.api.get_codec` imports this module when it first needs it.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import jax_triton

from echo_jax.kernels import triton_kernels
from echo_jax.wire import blocks as blocking
from echo_jax.wire import compact, quantizer
from echo_jax.wire.blocks import Piece
from echo_jax.wire.compact import Compact, Nibbles
from echo_jax.wire.format import WireFormat
from echo_jax.wire.rotation import hadamard


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tuning:
    """How one kernel is cut into programs; measured on an H200, see experiments/."""

    tile_values: int  # values of a tile; 16 or 32 a thread keep many programs resident
    num_warps: int  # of a program; few, so that its barriers wait for few
    stages: int = 1  # tiles that a program has in flight; 1: a program for each tile


# Without rotation a kernel is loads, a little arithmetic and stores: small programs
# and many of them hide the latency best. With it, the tensor cores and their barriers
# come in between, and programs that stay and fetch ahead do.
_SEND = _Tuning(tile_values=1024, num_warps=2)
_SEND_NIBBLES = _Tuning(tile_values=2048, num_warps=2)  # 16 bytes of them a thread
_REDUCE = _Tuning(tile_values=1024, num_warps=1)
_RETURN = _Tuning(tile_values=1024, num_warps=1)
_ROTATING = _Tuning(tile_values=2048, num_warps=2, stages=3)
_SMALLEST_DOT = 16  # rows that the tensor cores take at least
# Programs that stay: the 10 that the registers of each of an H200's 132
# multiprocessors have room for.
_RESIDENT_PROGRAMS = 1320
_PART_WIDTH = 32  # see triton_kernels
_WIDEST_ACCESS = 16  # bytes or values beyond which alignment gains nothing
# What is compiled for where no GPU is at hand; code for it runs on all later ones.
_OLDEST_CAPABILITY = 80
_UNUSED = jax.ShapeDtypeStruct((1,), jnp.uint8)


def send(x, residual, *, fmt: WireFormat, chunks: int, piece: Piece | None = None):
    """``(batch, rows, width)`` to ``(batch, chunks, payload)`` and the new residual."""
    batch, *shape = x.shape
    chunk_blocks = blocking.blocks_per_chunk(tuple(shape), fmt.block_size, chunks)
    start, blocks = _run(piece, chunk_blocks)
    payload_bytes = blocks * fmt.block_bytes
    tuning = _SEND_NIBBLES if _kind(residual) == "nibbles" else _SEND
    tuning = _ROTATING if fmt.rotate else tuning
    row_scalars, row_constants = _rows(shape, fmt)
    payloads, *owed = _launch(
        triton_kernels.send_kernel,
        [x, *_residual_inputs(residual, x), _matrix(fmt, fmt.forward_exponent)],
        [*row_scalars, chunks, *_place(chunk_blocks, start, blocks, payload_bytes)],
        [
            jax.ShapeDtypeStruct((batch, chunks, payload_bytes), jnp.uint8),
            *_residual_outputs(residual),
        ],
        (blocks, batch * chunks),
        fmt=fmt,
        tuning=tuning,
        input_output_aliases=_aliases(residual),
        KIND=_kind(residual),
        ROTATE=fmt.rotate,
        STAGES=tuning.stages,
        SCALE_FACTOR=float(quantizer.scale_factor(fmt)),
        ALIGN=_alignment(payload_bytes),
        **row_constants,
    )
    return payloads, _residual_result(residual, owed)


def reduce(payloads, residual, *, fmt: WireFormat, piece: Piece | None = None):
    """``(batch, ranks, payload)`` to ``(batch, payload)`` and the new residual."""
    batch, ranks, payload_bytes = payloads.shape
    blocks = payload_bytes // fmt.block_bytes
    chunk_blocks = blocks if residual is None else residual.shape[1]
    start, _ = _run(piece, chunk_blocks)
    sums, *owed = _launch(
        triton_kernels.reduce_kernel,
        [payloads, *_residual_inputs(residual, payloads)],
        _place(chunk_blocks, start, blocks, payload_bytes),
        [
            jax.ShapeDtypeStruct((batch, payload_bytes), jnp.uint8),
            *_residual_outputs(residual),
        ],
        (blocks, batch),
        fmt=fmt,
        tuning=_REDUCE,
        input_output_aliases=_aliases(residual),
        KIND=_kind(residual),
        RANKS=ranks,
        SCALE_FACTOR=float(quantizer.scale_factor(fmt)),
        ALIGN=_alignment(payload_bytes),
    )
    return sums, _residual_result(residual, owed)


def return_(
    payloads,
    stream,
    out,
    *,
    shape: tuple[int, int],
    dtype,
    fmt: WireFormat,
    piece: Piece | None = None,
):
    """``(batch, chunks, payload)`` to ``(batch, rows, width)``, plus the stream."""
    batch, chunks, payload_bytes = payloads.shape
    chunk_blocks = blocking.blocks_per_chunk(shape, fmt.block_size, chunks)
    start, blocks = _run(piece, chunk_blocks)
    tuning = _ROTATING if fmt.rotate else _RETURN
    row_scalars, row_constants = _rows(shape, fmt)
    (rows,) = _launch(
        triton_kernels.return_kernel,
        [
            payloads if out is None else out,
            payloads,
            payloads if stream is None else stream,
            _matrix(fmt, 0),
        ],
        [*row_scalars, chunks, *_place(chunk_blocks, start, blocks, payload_bytes)],
        [jax.ShapeDtypeStruct((batch, *shape), dtype)],
        (blocks, batch * chunks),
        fmt=fmt,
        tuning=tuning,
        input_output_aliases={} if out is None else {0: 0},
        ADD=stream is not None,
        ROTATE=fmt.rotate,
        STAGES=tuning.stages,
        UNROTATE_SCALE=2.0**-fmt.inverse_exponent,
        ALIGN=_alignment(payload_bytes),
        **row_constants,
    )
    return rows


def _launch(
    kernel, arrays, scalars, outputs, extent, *, fmt: WireFormat, tuning, **options
):
    """Runs a kernel over ``extent``: blocks, a tile of them at a time, times chunks."""
    blocks, chunks = extent
    tile = tuning.tile_values // fmt.block_size
    if options.get("ROTATE"):
        tile = max(tile, _SMALLEST_DOT)
    programs = -(-blocks // tile)
    if tuning.stages > 1:
        programs = min(programs, max(1, _RESIDENT_PROGRAMS // chunks))
    return jax_triton.triton_call(
        *arrays,
        *scalars,
        kernel=kernel,
        name=f"echo_{kernel.fn.__name__}",
        out_shape=outputs,
        grid=(programs, chunks),
        num_warps=tuning.num_warps,
        enable_fp_fusion=False,
        compute_capability=_compute_capability(),
        BITS=fmt.bits,
        SIZE=fmt.block_size,
        WIDTH=_part_width(fmt),
        TILE=tile,
        **options,
    )


def _run(piece: Piece | None, chunk_blocks: int) -> tuple[int, int]:
    """Where the piece's run of blocks begins in a chunk, and how long it is."""
    start, stop = piece or (0, chunk_blocks)
    return start, stop - start


def _place(chunk_blocks: int, start: int, blocks: int, payload_bytes: int):
    """What a kernel must know of chunks and pieces."""
    return [chunk_blocks, start, blocks, payload_bytes // _alignment(payload_bytes)]


def _part_width(fmt: WireFormat) -> int:
    """Values of a block that form one part: no more than packed bytes share."""
    return min(_PART_WIDTH, fmt.code_bytes, fmt.block_size // 2)


def _matrix(fmt: WireFormat, exponent: int) -> jax.Array:
    """The Hadamard matrix of a part, scaled so that going in nothing overflows."""
    return jnp.asarray(hadamard(_part_width(fmt)) * 2.0**-exponent, jnp.bfloat16)


def _rows(shape, fmt: WireFormat):
    """What a kernel must know of the rows: arguments, and constants of its code."""
    rows, width = shape
    blocks_per_row = -(-width // fmt.block_size)
    alignment = _alignment(width)
    scalars = (rows * blocks_per_row, blocks_per_row, width // alignment)
    ragged = width % fmt.block_size != 0
    return scalars, {"RAGGED": ragged, "ROW_ALIGN": alignment}


def _alignment(count: int) -> int:
    """The power of two that divides a stride, as far as wide accesses can use it."""
    return math.gcd(count, _WIDEST_ACCESS)


def _kind(residual) -> str:
    if residual is None:
        return "none"
    if isinstance(residual, Compact):
        return "nibbles" if isinstance(residual, Nibbles) else "bytes"
    return "float"


def _residual_inputs(residual, unused):
    if residual is None:
        return unused, unused
    if isinstance(residual, Compact):
        return compact.to_bytes(residual.codes), residual.scales
    return residual, unused


def _residual_outputs(residual):
    if residual is None:
        return _UNUSED, _UNUSED
    if isinstance(residual, Compact):
        codes = jax.ShapeDtypeStruct(residual.codes.shape, jnp.int8)
        return codes, jax.ShapeDtypeStruct(residual.scales.shape, jnp.bfloat16)
    return jax.ShapeDtypeStruct(residual.shape, residual.dtype), _UNUSED


def _aliases(residual) -> dict[int, int]:
    """The new residual takes the place of the old; inputs and outputs by position."""
    return {index: index for index in range(1, 1 + len(jax.tree.leaves(residual)))}


def _residual_result(residual, outputs):
    if residual is None:
        return None
    if isinstance(residual, Compact):
        return type(residual)(compact.from_bytes(outputs[0]), outputs[1])
    return outputs[0]


@functools.cache
def _compute_capability() -> int:
    """That of the local GPU, times ten."""
    try:
        version = jax.local_devices(backend="cuda")[0].compute_capability
    except RuntimeError:
        return _OLDEST_CAPABILITY
    return int(float(version) * 10)
