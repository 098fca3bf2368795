"""Launches the Triton kernels through jax-triton.

Every array has a leading batch axis, see :mod:`echo_jax.kernels.dispatch`. Importing
this module fails without jax-triton and, with its version 0.3, without JAX's CUDA
plugin. :func:`echo_jax.kernels.api.get_codec` therefore imports it only when needed.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from echo_jax.kernels import triton_call, triton_kernels
from echo_jax.wire import blocks as blocking
from echo_jax.wire import compact, quantizer
from echo_jax.wire.blocks import Piece
from echo_jax.wire.compact import Compact, Nibbles
from echo_jax.wire.format import WireFormat
from echo_jax.wire.rotation import hadamard


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tuning:
    """How one kernel is cut into programs; measured on an H200, see experiments/."""

    # Values of a tile. With 16 or 32 for each thread, many programs stay resident.
    tile_values: int
    num_warps: int  # of a program; with few, barriers wait for few
    tiles: int = 1  # of a program, one after the other; more than one need stages
    stages: int = 1  # tiles that a program has in flight


# Without rotation a kernel is loads, a little arithmetic and stores; many small
# programs hide memory latency best. With rotation, tensor cores and barriers come in
# between, and programs that load the next tiles meanwhile are faster. They are short
# all the same: where a message is cut into pieces, the kernels that transport one piece
# can begin only where programs that process another one end.
_SEND = _Tuning(tile_values=1024, num_warps=2)
_SEND_NIBBLES = _Tuning(tile_values=2048, num_warps=2)  # 16 bytes for each thread
_REDUCE = _Tuning(tile_values=1024, num_warps=1)
_RETURN = _Tuning(tile_values=1024, num_warps=1)
_ROTATING = _Tuning(tile_values=2048, num_warps=2, tiles=4, stages=3)
# Adding up rotated ranks takes so many registers that fewer threads are better. Timed
# with two ranks.
_ADDING_ROTATED = _Tuning(tile_values=1024, num_warps=1, tiles=8, stages=3)
# Programs that keep a GPU busy: a small message is cut into about as many, if it has as
# many tiles. Ten for each of an H200's 132 multiprocessors, more for smaller GPUs.
_ENOUGH_PROGRAMS = 1320
_SMALLEST_DOT = 16  # the fewest rows and columns that the tensor cores take
_PART_WIDTH = 32  # see triton_kernels
_WIDEST_ACCESS = 16  # bytes or values beyond which alignment gains nothing
# As far as a CUDA grid reaches beyond its first dimension; there the chunks of all
# messages of a batch lie.
_MOST_CHUNKS = 65_535
# Assumed when compiling without a GPU: code for it runs on all later ones.
_OLDEST_CAPABILITY = 80


def _in_groups(stage):
    """The stage for a batch of any size, in as few launches as it takes."""

    @functools.wraps(stage)
    def in_groups(first, *others, **static):
        chunks = static.get("chunks") or first.shape[-2]
        most = max(1, _MOST_CHUNKS // chunks)
        batch, arrays = first.shape[0], (first, *others)
        if batch <= most:
            return stage(*arrays, **static)
        groups = [
            stage(*jax.tree.map(lambda a, s=s: a[s : s + most], arrays), **static)
            for s in range(0, batch, most)
        ]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *groups)

    return in_groups


@_in_groups
def send(x, residual, *, fmt: WireFormat, chunks: int, piece: Piece | None = None):
    """``(batch, rows, width)`` to ``(batch, chunks, payload)`` and the new residual."""
    batch, *shape = x.shape
    chunk_blocks = blocking.blocks_per_chunk(tuple(shape), fmt.block_size, chunks)
    start, blocks = _run(piece, chunk_blocks)
    payload_bytes = blocks * fmt.block_bytes
    tuning = _send_tuning(fmt, residual)
    row_scalars, row_constants = _rows(shape, fmt)
    (payloads,), owed = _launch(
        triton_kernels.send_kernel,
        [
            x,
            *_residual_operands(residual, x),
            _matrix(fmt, fmt.forward_exponent),
            *row_scalars,
            chunks,
            *_place(chunk_blocks, start, blocks, payload_bytes),
        ],
        [jax.ShapeDtypeStruct((batch, chunks, payload_bytes), jnp.uint8)],
        (blocks, batch * chunks),
        in_place=_residual_places(residual),
        fmt=fmt,
        tuning=tuning,
        KIND=_kind(residual),
        ROTATE=fmt.rotate,
        STAGES=tuning.stages,
        SCALE_FACTOR=float(quantizer.scale_factor(fmt)),
        ALIGN=_alignment(payload_bytes),
        **row_constants,
    )
    return payloads, _residual_result(residual, owed)


@_in_groups
def reduce(payloads, residual, *, fmt: WireFormat, piece: Piece | None = None):
    """``(batch, ranks, payload)`` to ``(batch, payload)`` and the new residual."""
    batch, ranks, payload_bytes = payloads.shape
    blocks = payload_bytes // fmt.block_bytes
    chunk_blocks = blocks if residual is None else residual.shape[1]
    start, _ = _run(piece, chunk_blocks)
    (sums,), owed = _launch(
        triton_kernels.reduce_kernel,
        [
            payloads,
            *_residual_operands(residual, payloads),
            *_place(chunk_blocks, start, blocks, payload_bytes),
        ],
        [jax.ShapeDtypeStruct((batch, payload_bytes), jnp.uint8)],
        (blocks, batch),
        in_place=_residual_places(residual),
        fmt=fmt,
        tuning=_REDUCE,
        KIND=_kind(residual),
        RANKS=ranks,
        SCALE_FACTOR=float(quantizer.scale_factor(fmt)),
        ALIGN=_alignment(payload_bytes),
    )
    return sums, _residual_result(residual, owed)


@_in_groups
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
    """``(batch, ranks, chunks, payload)`` to ``(batch, rows, width)``, plus stream."""
    batch, ranks, chunks, payload_bytes = payloads.shape
    chunk_blocks = blocking.blocks_per_chunk(shape, fmt.block_size, chunks)
    start, blocks = _run(piece, chunk_blocks)
    tuning = _return_tuning(fmt, ranks)
    row_scalars, row_constants = _rows(shape, fmt)
    operands = [
        payloads,
        payloads if stream is None else stream,
        _matrix(fmt, 0),
        *row_scalars,
        chunks,
        *_place(chunk_blocks, start, blocks, payload_bytes),
    ]
    fresh, changed = _launch(
        triton_kernels.return_kernel,
        operands if out is None else [*operands, out],
        [jax.ShapeDtypeStruct((batch, *shape), dtype)] if out is None else [],
        (blocks, batch * chunks),
        in_place=() if out is None else (len(operands),),
        fmt=fmt,
        tuning=tuning,
        RANKS=ranks,
        ADD=stream is not None,
        ROTATE=fmt.rotate,
        STAGES=tuning.stages,
        UNROTATE_SCALE=2.0**-fmt.inverse_exponent,
        ALIGN=_alignment(payload_bytes),
        **row_constants,
    )
    (rows,) = fresh or changed
    return rows


def _launch(
    kernel, operands, results, extent, *, in_place, fmt: WireFormat, tuning, **constants
):
    """Runs a kernel over ``extent``: blocks, in tiles, and chunks."""
    blocks, chunks = extent
    tile = tuning.tile_values // fmt.block_size
    if constants.get("ROTATE"):
        tile = max(tile, _SMALLEST_DOT)
    assert tuning.tiles == 1 or tuning.stages > 1, "a program would leave out tiles"
    tiles = -(-blocks // tile)
    programs = max(-(-tiles // tuning.tiles), min(tiles, _ENOUGH_PROGRAMS // chunks))
    return triton_call.call(
        kernel,
        operands,
        results=results,
        in_place=in_place,
        name=f"echo_{kernel.fn.__name__}",
        grid=(programs, chunks),
        num_warps=tuning.num_warps,
        compute_capability=_compute_capability(),
        constants={
            "BITS": fmt.bits,
            "SIZE": fmt.block_size,
            "WIDTH": _part_width(fmt),
            "TILE": tile,
            **constants,
        },
    )


def _send_tuning(fmt: WireFormat, residual) -> _Tuning:
    if fmt.rotate:
        return _ROTATING
    return _SEND_NIBBLES if _kind(residual) == "nibbles" else _SEND


def _return_tuning(fmt: WireFormat, ranks: int) -> _Tuning:
    if fmt.rotate:
        return _ROTATING if ranks == 1 else _ADDING_ROTATED
    return _RETURN


def _run(piece: Piece | None, chunk_blocks: int) -> tuple[int, int]:
    """Where the piece's run of blocks begins in a chunk, and how long it is."""
    start, stop = piece or (0, chunk_blocks)
    return start, stop - start


def _place(chunk_blocks: int, start: int, blocks: int, payload_bytes: int):
    """A kernel's arguments about chunks, pieces and payloads."""
    return [chunk_blocks, start, blocks, payload_bytes // _alignment(payload_bytes)]


def _part_width(fmt: WireFormat) -> int:
    """Values of a block in one part.

    No more than the block has packed bytes in its first plane; nor in the second one,
    if those are enough for the tensor cores.
    """
    first, *others = (fmt.block_size * bits // 8 for bits in fmt.planes)
    widest = [max(plane_bytes, _SMALLEST_DOT) for plane_bytes in others]
    return min(_PART_WIDTH, first, *widest, fmt.block_size // 2)


def _matrix(fmt: WireFormat, exponent: int) -> jax.Array:
    """The Hadamard matrix of a part times ``2**-exponent``.

    Scaling the matrix of the forward rotation keeps its sums from overflowing.
    """
    return jnp.asarray(hadamard(_part_width(fmt)) * 2.0**-exponent, jnp.bfloat16)


def _rows(shape, fmt: WireFormat):
    """A kernel's arguments about rows, and the constants it is compiled with."""
    rows, width = shape
    blocks_per_row = -(-width // fmt.block_size)
    alignment = _alignment(width)
    scalars = (rows * blocks_per_row, blocks_per_row, width // alignment)
    ragged = width % fmt.block_size != 0
    return scalars, {"RAGGED": ragged, "ROW_ALIGN": alignment}


def _alignment(count: int) -> int:
    """The largest power of two that divides a stride, up to the widest access."""
    return math.gcd(count, _WIDEST_ACCESS)


def _kind(residual) -> str:
    if residual is None:
        return "none"
    if isinstance(residual, Compact):
        return "nibbles" if isinstance(residual, Nibbles) else "bytes"
    return "float"


def _residual_operands(residual, unused):
    """The arrays of a residual; without one, placeholders that kernels do not read."""
    if residual is None:
        return unused, unused
    if isinstance(residual, Compact):
        return compact.to_bytes(residual.codes), residual.scales
    return residual, unused


def _residual_places(residual) -> range:
    """The positions of a residual's arrays among the operands: after the first."""
    return range(1, 1 + len(jax.tree.leaves(residual)))


def _residual_result(residual, arrays):
    if residual is None:
        return None
    if isinstance(residual, Compact):
        return type(residual)(compact.from_bytes(arrays[0]), arrays[1])
    return arrays[0]


def _compute_capability() -> int:
    """The compute capability of the local GPU, times ten."""
    gpu = _local_gpu()
    return int(float(gpu.compute_capability) * 10) if gpu else _OLDEST_CAPABILITY


@functools.cache
def _local_gpu():
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None
