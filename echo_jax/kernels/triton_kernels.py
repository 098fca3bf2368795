"""The codec's three kernels in Triton: send, reduce and return.

A program processes ``TILE`` blocks of one chunk at a time and keeps them as a tuple of
*parts*, each ``(TILE, WIDTH)`` values in float32: part ``p`` holds the values
``p WIDTH`` to ``(p + 1) WIDTH`` of every block. A byte has ``8 / BITS`` slots and holds
one value from each of as many parts, so that packing is a shift and an or of whole
parts, and nothing is ever shuffled. ``WIDTH`` is 32 where the block allows it: a row of
a part is then two memory sectors in bfloat16, and the Hadamard matrix of a part is one
operand of the tensor cores. The Hadamard matrix of a block is the Kronecker product of
the one over its parts and the one within a part, so that the rest of the rotation adds
and subtracts whole parts.

Codes of 3 and 6 bits are in two planes, each packed like that. ``WIDTH`` is then at
most the bytes of the second, smaller plane, but not below the 16 columns that tensor
cores need: where that plane has half as many, a byte of it holds values from both
halves of a part.

Multiply-adds are written out as ``fma``, and the compiler does not fuse any itself.
Every product that is fused here is exact, so that the results equal those of the
definition, ``kernels/xla.py``.

A ``new_...`` parameter is the address at which to write an array in place. If it is
None, that is the address of the operand itself, see
:mod:`echo_jax.kernels.triton_call`.

Messages are the entries of a batch (of ``vmap``); one launch processes all of them.
Offsets within a tile have 32 bits and the start of a tile has 64, so that a tensor may
have any number of elements.
"""

import triton
import triton.language as tl

from echo_jax.kernels.triton_tiles import (
    add_owed,
    add_parts,
    add_scaled,
    block_scales,
    encode,
    load_matrix,
    load_owed,
    load_rows,
    message_size,
    read,
    rotate,
    scale_parts,
    sections,
    store_rows,
    to_bfloat16,
    to_float,
)


@triton.jit
def send_kernel(
    x,
    owed,
    owed_scales,
    matrix,  # the Hadamard matrix of a part, times a power of two
    total_blocks,  # of a message; blocks after these, up to whole chunks, are zero
    blocks_per_row,
    row_units,  # values of a row, in units of ROW_ALIGN
    chunks,
    chunk_blocks,  # blocks of a chunk
    piece_start,  # the first block of a chunk that is sent
    blocks,  # how many blocks of a chunk are sent
    payload_units,  # bytes of a payload, in units of ALIGN
    payloads,
    new_owed: tl.constexpr,
    new_owed_scales: tl.constexpr,
    KIND: tl.constexpr,  # of the residual: "none", "float", "bytes" or "nibbles"
    RAGGED: tl.constexpr,  # whether the last block of a row is not full
    ROW_ALIGN: tl.constexpr,
    ROTATE: tl.constexpr,
    SCALE_FACTOR: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,  # tiles whose loads are in flight at once
):
    """Rotates, adds the residual, quantizes and packs; stores the rounding error."""
    if new_owed is None:
        new_owed = owed
    if new_owed_scales is None:
        new_owed_scales = owed_scales
    chunk = tl.program_id(1)
    message = chunk // chunks
    row_width = row_units * ROW_ALIGN
    size = message_size(total_blocks, blocks_per_row, row_width, RAGGED, SIZE)
    x += message.to(tl.int64) * size
    entries = load_matrix(matrix, ROTATE, WIDTH)
    first_chunk = message * chunks
    if STAGES == 1:
        _send_tile(
            tl.program_id(0), x, owed, owed_scales, entries, total_blocks,
            blocks_per_row, row_width, chunk, first_chunk, chunk_blocks, piece_start,
            blocks, payload_units, payloads, new_owed, new_owed_scales, KIND, RAGGED,
            ROTATE, SCALE_FACTOR, BITS, SIZE, WIDTH, ALIGN, TILE,
        )  # fmt: skip
    else:
        tiles = tl.cdiv(blocks, TILE)
        for tile in tl.range(
            tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES
        ):
            _send_tile(
                tile, x, owed, owed_scales, entries, total_blocks, blocks_per_row,
                row_width, chunk, first_chunk, chunk_blocks, piece_start, blocks,
                payload_units, payloads, new_owed, new_owed_scales, KIND, RAGGED,
                ROTATE, SCALE_FACTOR, BITS, SIZE, WIDTH, ALIGN, TILE,
            )  # fmt: skip


@triton.jit
def _send_tile(
    tile,
    x,
    owed,
    owed_scales,
    entries,
    total_blocks,
    blocks_per_row,
    row_width,
    chunk,
    first_chunk,
    chunk_blocks,
    piece_start,
    blocks,
    payload_units,
    payloads,
    new_owed,
    new_owed_scales,
    KIND: tl.constexpr,
    RAGGED: tl.constexpr,
    ROTATE: tl.constexpr,
    SCALE_FACTOR: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.arange(0, TILE)
    inside = tile * TILE + row < blocks
    first = (chunk - first_chunk) * chunk_blocks + piece_start + tile * TILE
    values = load_rows(
        x, first, row, inside & (first + row < total_blocks), blocks_per_row,
        row_width, RAGGED, SIZE, WIDTH,
    )  # fmt: skip
    # Loaded before the rotation, whose barriers would delay these loads.
    start = chunk.to(tl.int64) * chunk_blocks + piece_start + tile * TILE
    stride: tl.constexpr = SIZE // 2 if KIND == "nibbles" else SIZE
    kept = load_owed(
        owed + start * stride, owed_scales + start, row, inside, KIND, SIZE, WIDTH
    )
    if ROTATE:
        values = rotate(values, entries, SIZE // WIDTH, WIDTH)
    else:
        values = to_float(values)
    values = add_owed(values, kept, KIND)
    body, tail = sections(
        payloads, chunk, payload_units, tile, blocks, BITS, SIZE, ALIGN, TILE
    )
    encode(
        values, block_scales(values, SCALE_FACTOR), body, tail,
        new_owed + start * stride, new_owed_scales + start, row, inside, KIND, BITS,
        SIZE, WIDTH,
    )  # fmt: skip


@triton.jit
def reduce_kernel(
    payloads,
    owed,
    owed_scales,
    chunk_blocks,
    piece_start,
    blocks,
    payload_units,
    sums,
    new_owed: tl.constexpr,
    new_owed_scales: tl.constexpr,
    KIND: tl.constexpr,
    RANKS: tl.constexpr,
    SCALE_FACTOR: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Adds one chunk of each rank, in rank order, and the residual; quantizes."""
    if new_owed is None:
        new_owed = owed
    if new_owed_scales is None:
        new_owed_scales = owed_scales
    tile, message = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, TILE)
    inside = tile * TILE + row < blocks
    start = message.to(tl.int64) * chunk_blocks + piece_start + tile * TILE
    stride: tl.constexpr = SIZE // 2 if KIND == "nibbles" else SIZE
    kept = load_owed(
        owed + start * stride, owed_scales + start, row, inside, KIND, SIZE, WIDTH
    )
    body, tail = sections(
        payloads, message * RANKS, payload_units, tile, blocks, BITS, SIZE, ALIGN, TILE
    )
    levels, scale = read(body, tail, row, inside, BITS, SIZE, WIDTH)
    values = scale_parts(levels, scale)
    # Unrolled for up to 16 ranks, so that the loads of all are in flight at once.
    for rank in tl.range(1, RANKS, loop_unroll_factor=min(RANKS, 16) - 1):
        skip = tl.full((), ALIGN, tl.int64) * payload_units * rank
        levels, scale = read(
            body + skip, tail + skip // 2, row, inside, BITS, SIZE, WIDTH
        )
        values = add_scaled(values, levels, scale)
    values = add_owed(values, kept, KIND)
    body, tail = sections(
        sums, message, payload_units, tile, blocks, BITS, SIZE, ALIGN, TILE
    )
    encode(
        values, block_scales(values, SCALE_FACTOR), body, tail,
        new_owed + start * stride, new_owed_scales + start, row, inside, KIND, BITS,
        SIZE, WIDTH,
    )  # fmt: skip


@triton.jit
def return_kernel(
    payloads,
    stream,
    matrix,
    total_blocks,
    blocks_per_row,
    row_units,
    chunks,
    chunk_blocks,
    piece_start,
    blocks,
    payload_units,
    out,  # the rows, in which earlier pieces are already written
    new_out: tl.constexpr,
    RANKS: tl.constexpr,  # whose payloads are added up
    ADD: tl.constexpr,  # whether to add to the stream
    RAGGED: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    ROTATE: tl.constexpr,
    UNROTATE_SCALE: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Dequantizes, rotates back, adds the ranks and the stream, casts.

    A message has all chunks of the first rank, then all of the next one, and so on.
    """
    if new_out is None:
        new_out = out
    chunk = tl.program_id(1)
    message = chunk // chunks
    row_width = row_units * ROW_ALIGN
    size = message_size(total_blocks, blocks_per_row, row_width, RAGGED, SIZE)
    stream += message.to(tl.int64) * size
    new_out += message.to(tl.int64) * size
    entries = load_matrix(matrix, ROTATE, WIDTH)
    first_chunk = message * chunks
    if STAGES == 1:
        _return_tile(
            tl.program_id(0), payloads, stream, entries, total_blocks, blocks_per_row,
            row_width, chunk, first_chunk, chunk_blocks, piece_start, blocks,
            payload_units, chunks, new_out, RANKS, ADD, RAGGED, ROTATE, UNROTATE_SCALE,
            BITS, SIZE, WIDTH, ALIGN, TILE,
        )  # fmt: skip
    else:
        tiles = tl.cdiv(blocks, TILE)
        for tile in tl.range(
            tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES
        ):
            _return_tile(
                tile, payloads, stream, entries, total_blocks, blocks_per_row,
                row_width, chunk, first_chunk, chunk_blocks, piece_start, blocks,
                payload_units, chunks, new_out, RANKS, ADD, RAGGED, ROTATE,
                UNROTATE_SCALE, BITS, SIZE, WIDTH, ALIGN, TILE,
            )  # fmt: skip


@triton.jit
def _return_tile(
    tile,
    payloads,
    stream,
    entries,
    total_blocks,
    blocks_per_row,
    row_width,
    chunk,
    first_chunk,
    chunk_blocks,
    piece_start,
    blocks,
    payload_units,
    chunks,
    out,
    RANKS: tl.constexpr,
    ADD: tl.constexpr,
    RAGGED: tl.constexpr,
    ROTATE: tl.constexpr,
    UNROTATE_SCALE: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.arange(0, TILE)
    inside = tile * TILE + row < blocks
    first_payload = first_chunk * (RANKS - 1) + chunk
    body, tail = sections(
        payloads, first_payload, payload_units, tile, blocks, BITS, SIZE, ALIGN, TILE
    )
    levels, scale = read(body, tail, row, inside, BITS, SIZE, WIDTH)
    first = (chunk - first_chunk) * chunk_blocks + piece_start + tile * TILE
    exists = inside & (first + row < total_blocks)
    kept = ()
    if ADD:
        kept = load_rows(
            stream, first, row, exists, blocks_per_row, row_width, RAGGED, SIZE, WIDTH
        )
    if ROTATE:
        levels = rotate(to_bfloat16(levels), entries, SIZE // WIDTH, WIDTH)
        scale = scale * UNROTATE_SCALE
    # Of one rank, the addition to the stream is the only rounding.
    if ADD and RANKS == 1:
        values = add_scaled(to_float(kept), levels, scale)
    else:
        values = scale_parts(levels, scale)
    unroll: tl.constexpr = 1 if ROTATE else min(RANKS, 16) - 1  # rotating takes room
    for rank in tl.range(1, RANKS, loop_unroll_factor=unroll):
        skip = tl.full((), ALIGN, tl.int64) * payload_units * chunks * rank
        levels, scale = read(
            body + skip, tail + skip // 2, row, inside, BITS, SIZE, WIDTH
        )
        if ROTATE:
            levels = rotate(to_bfloat16(levels), entries, SIZE // WIDTH, WIDTH)
            scale = scale * UNROTATE_SCALE
        values = add_scaled(values, levels, scale)
    if RANKS > 1 and ADD:
        values = add_parts(to_float(kept), values)
    store_rows(
        values, out, first, row, exists, blocks_per_row, row_width, RAGGED, SIZE, WIDTH
    )
