"""The steps of the Triton kernels on one tile; see ``triton_kernels.py``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from echo_jax.kernels.triton_codes import (
    levels_of,
    load_levels,
    load_plane,
    store_codes,
    store_plane,
)
from echo_jax.wire import quantizer

_SMALLEST_SCALE = tl.constexpr(quantizer.MIN_SCALE)
_LARGEST_SCALE = tl.constexpr(quantizer.MAX_SCALE)
# The interpreter has no libdevice, and needs other code in a few places.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# The tensor cores take matrices of at least 16 columns.
_SMALLEST_DOT = tl.constexpr(16)


@triton.jit
def sections(
    payloads,
    index,
    payload_units,
    tile,
    blocks,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    ALIGN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Pointers to a tile's codes and scales in the payload number ``index``."""
    code_bytes: tl.constexpr = SIZE * BITS // 8
    payload = payloads + index.to(tl.int64) * (payload_units * ALIGN)
    body = payload + tl.full((), TILE * code_bytes, tl.int64) * tile
    tail = payload + tl.full((), code_bytes, tl.int64) * blocks
    return body, tail.to(tl.pointer_type(tl.bfloat16)) + tile * TILE


@triton.jit
def message_size(
    total_blocks, blocks_per_row, row_width, RAGGED: tl.constexpr, SIZE: tl.constexpr
):
    """Number of values in a message.

    Without ragged rows it is computed from the number of blocks, which shows the
    compiler that it is a multiple of the block size and so aligned.
    """
    # tl.full, since an argument of value 1 is a constant without a dtype to convert.
    if RAGGED:
        size = tl.full((), 1, tl.int64) * (total_blocks // blocks_per_row) * row_width
    else:
        size = tl.full((), SIZE, tl.int64) * total_blocks
    return size


@triton.jit
def _row_pointers(
    x,
    first,
    row,
    inside,
    part,
    blocks_per_row,
    row_width,
    RAGGED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Pointers to one part of a run of blocks, and a mask of the values that exist."""
    lane = part * WIDTH + tl.arange(0, WIDTH)[None, :]
    if RAGGED:
        block = first + row
        line = block // blocks_per_row
        column = ((block - line * blocks_per_row) * SIZE)[:, None] + lane
        pointers = x + (line.to(tl.int64)[:, None] * row_width + column)
        mask = inside[:, None] & (column < row_width)
    else:
        pointers = x + first.to(tl.int64) * SIZE + (row[:, None] * SIZE + lane)
        mask = inside[:, None]
    return pointers, mask


@triton.jit
def load_rows(
    x,
    first,
    row,
    inside,
    blocks_per_row,
    row_width,
    RAGGED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The parts of a run of blocks, in the dtype of ``x``; zeros past the end."""
    parts = ()
    for part in tl.static_range(SIZE // WIDTH):
        pointers, mask = _row_pointers(
            x, first, row, inside, part, blocks_per_row, row_width, RAGGED, SIZE, WIDTH
        )
        parts += (tl.load(pointers, mask=mask, other=0.0),)
    return parts


@triton.jit
def store_rows(
    values,
    out,
    first,
    row,
    inside,
    blocks_per_row,
    row_width,
    RAGGED: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes the parts of a run of blocks, in the dtype of ``out``."""
    for part in tl.static_range(SIZE // WIDTH):
        pointers, mask = _row_pointers(
            out,
            first,
            row,
            inside,
            part,
            blocks_per_row,
            row_width,
            RAGGED,
            SIZE,
            WIDTH,
        )
        tl.store(pointers, _cast(values[part], out.dtype.element_ty), mask=mask)


@triton.jit
def _cast(x, DTYPE: tl.constexpr):
    """A conversion that rounds to nearest; the interpreter's own one truncates."""
    if _INTERPRETED and DTYPE == tl.bfloat16:  # noqa: SIM300, a type, not a constant
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def to_float(parts):
    """The parts in float32."""
    out = ()
    for part in tl.static_range(len(parts)):
        out += (parts[part].to(tl.float32),)
    return out


@triton.jit
def to_bfloat16(parts):
    """The parts in bfloat16, which holds integers up to 2**8 exactly."""
    out = ()
    for part in tl.static_range(len(parts)):
        out += (parts[part].to(tl.bfloat16),)
    return out


@triton.jit
def add_parts(left, right):
    """The sums of two values' parts."""
    out = ()
    for part in tl.static_range(len(left)):
        out += (left[part] + right[part],)
    return out


@triton.jit
def _transform_part(part, entries, WIDTH: tl.constexpr):
    """``part @ entries`` with exact products and sums in float32."""
    if WIDTH < _SMALLEST_DOT:
        terms = part.to(tl.float32)[:, :, None] * entries.to(tl.float32)[None, :, :]
        total = tl.sum(terms, axis=1)
    else:
        if part.dtype == tl.bfloat16:
            total = _dot(part, entries, None)
        else:
            # Split exactly into bfloat16 terms of 8 significant bits each; the smallest
            # is added first.
            high = _truncate(part.to(tl.float32))
            rest = part.to(tl.float32) - high
            middle = _truncate(rest)
            total = None
            if part.dtype == tl.float32:
                total = _dot(rest - middle, entries, None)
            total = _dot(middle, entries, total)
            total = _dot(high, entries, total)
    return total


@triton.jit
def _dot(left, right, total):
    """``left @ right + total`` in float32, of values that bfloat16 holds exactly."""
    if _INTERPRETED:  # the interpreter mistakes bfloat16 for integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    else:
        left, right = left.to(tl.bfloat16), right.to(tl.bfloat16)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def _truncate(x):
    """The leading 8 significant bits of a float32; never overflows."""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _transform_across(parts, PARTS: tl.constexpr):
    """The Hadamard transform over the parts: additions and subtractions of parts."""
    if PARTS == 1:
        out = parts
    else:
        half: tl.constexpr = PARTS // 2
        top = ()
        bottom = ()
        for part in tl.static_range(half):
            top += (parts[part] + parts[part + half],)
            bottom += (parts[part] - parts[part + half],)
        out = _transform_across(top, half) + _transform_across(bottom, half)
    return out


@triton.jit
def load_matrix(matrix, ROTATE: tl.constexpr, WIDTH: tl.constexpr):
    """The Hadamard matrix of a part, or None without rotation."""
    entries = None
    if ROTATE:
        index = tl.arange(0, WIDTH)
        entries = tl.load(matrix + index[:, None] * WIDTH + index[None, :])
    return entries


@triton.jit
def rotate(parts, entries, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """The Hadamard transform, times the power of two that ``entries`` contain."""
    out = ()
    for part in tl.static_range(PARTS):
        out += (_transform_part(parts[part], entries, WIDTH),)
    return _transform_across(out, PARTS)


@triton.jit
def load_owed(
    owed,
    scales,
    row,
    inside,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The stored residual of the previous call, and its scale for each block."""
    parts = ()
    scale = 0.0
    if KIND == "nibbles":
        parts = load_plane(owed, row, inside, 4, SIZE // 2, SIZE, WIDTH)
    elif KIND != "none":
        for part in tl.static_range(SIZE // WIDTH):
            offsets = row[:, None] * SIZE + part * WIDTH + tl.arange(0, WIDTH)[None, :]
            parts += (tl.load(owed + offsets, mask=inside[:, None], other=0),)
    if KIND == "bytes" or KIND == "nibbles":
        scale = tl.load(scales + row, mask=inside, other=0.0).to(tl.float32)
    return parts, scale


@triton.jit
def add_owed(values, kept, KIND: tl.constexpr):
    """Adds the residual that ``load_owed`` loaded."""
    parts, scale = kept
    if KIND == "bytes":
        numbers = to_float(parts)
        middles = ()
        for part in tl.static_range(len(numbers)):
            middles += (numbers[part] + 2.0**-7,)
        values = add_scaled(values, middles, scale * (1.0 / (255 - 2.0**-6)))
    elif KIND == "nibbles":
        # A level is 2 (n + 8) - 15 for the kept integer n.
        levels = levels_of(parts, (), 4)
        doubled = ()
        for part in tl.static_range(len(levels)):
            doubled += (levels[part] - (1.0 - 2.0**-6),)
        values = add_scaled(values, doubled, scale * (0.5 / (15 - 2.0**-6)))
    elif KIND == "float":
        values = add_parts(values, to_float(parts))
    return values


@triton.jit
def _larger(left, right):
    """The maximum of two values; NaN if either is NaN."""
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_scales(values, SCALE_FACTOR: tl.constexpr):
    """The scale of each block: zero if too small, NaN if too large or not finite."""
    peak = tl.abs(values[0])
    for part in tl.static_range(1, len(values)):
        peak = _larger(peak, tl.abs(values[part]))
    peak = tl.reduce(peak, 1, _larger)
    scale = _cast(peak * SCALE_FACTOR, tl.bfloat16).to(tl.float32)
    scale = tl.where(scale < _SMALLEST_SCALE, 0.0, scale)
    return tl.where(scale <= _LARGEST_SCALE, scale, float("nan"))


@triton.jit
def encode(
    values,
    scale,
    body,
    tail,
    owed,
    scales,
    row,
    inside,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes codes and scales of ``values``, and the rounding error."""
    # Adding a number below 2**22 to this constant, rounding down, leaves the number's
    # floor, plus the offset of the codes, in the lowest bits of the float. Converting
    # to an integer would be slower.
    shift: tl.constexpr = 1.5 * 2**23 + (1 << (BITS - 1))
    usable = scale > 0.0
    inverse = tl.where(usable, tl.div_rn(1.0, tl.where(usable, scale, 1.0)), 0.0)
    codes = ()
    steps = ()
    for part in tl.static_range(len(values)):
        # No clipping: a value is at most (h - 1/2) (1 + 2**-8) scales, under h.
        position = values[part] * inverse[:, None]
        shifted = _fma_down(position, 1.0, shift)
        codes += (shifted.to(tl.int32, bitcast=True) & ((1 << BITS) - 1),)
        level = shifted - shift
        if KIND == "nibbles":
            steps += (_steps(position - level, 15, 8),)
        elif KIND != "none":
            if KIND == "bytes":
                left = _steps(position - level, 255, 0)
            else:
                left = tl.fma(-0.5 - level, scale[:, None], values[part])
                left = tl.where((scale == scale)[:, None], left, 0.0)
            offsets = row[:, None] * SIZE + part * WIDTH + tl.arange(0, WIDTH)[None, :]
            left = _cast(left, owed.dtype.element_ty)
            tl.store(owed + offsets, left, mask=inside[:, None])
    if KIND == "nibbles":
        store_plane(steps, owed, row, inside, 4, SIZE // 2, SIZE, WIDTH)
    store_codes(codes, body, row, inside, BITS, SIZE, WIDTH)
    tl.store(tail + row, scale.to(tl.bfloat16), mask=inside)
    if KIND == "bytes" or KIND == "nibbles":
        kept = tl.where(usable, scale, 0.0).to(tl.bfloat16)
        tl.store(scales + row, kept, mask=inside)


@triton.jit
def _fma_down(x, FACTOR: tl.constexpr, SHIFT: tl.constexpr):
    """``floor(FACTOR x) + SHIFT``, for a SHIFT of a magnitude whose spacing is 1."""
    if _INTERPRETED:
        out = tl.floor(x * FACTOR) + SHIFT
    else:
        out = libdevice.fma_rd(x, FACTOR, SHIFT)
    return out


@triton.jit
def _steps(position, COUNT: tl.constexpr, OFFSET: tl.constexpr):
    """The number of the step in which to store a residual, see wire/compact.py.

    ``position`` is that of the value in the interval of its code, from 0 to 1. The
    number is in the lowest bits of the result.
    """
    factor: tl.constexpr = COUNT - 2.0**-6
    shifted = _fma_down(position, factor, 1.5 * 2**23 - COUNT // 2 + OFFSET)
    steps = shifted.to(tl.int32, bitcast=True)
    return steps & 15 if COUNT == 15 else steps


@triton.jit
def read(
    body, tail, row, inside, BITS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """Levels ``2q + 1`` of each part, and half the scale of each block."""
    levels = load_levels(body, row, inside, BITS, SIZE, WIDTH)
    return levels, tl.load(tail + row, mask=inside, other=0.0).to(tl.float32) * 0.5


@triton.jit
def scale_parts(levels, scale):
    """Levels times the scale of their block."""
    out = ()
    for part in tl.static_range(len(levels)):
        out += (levels[part] * scale[:, None],)
    return out


@triton.jit
def add_scaled(values, levels, scale):
    """Adds levels times the scale of their block, rounding once."""
    out = ()
    for part in tl.static_range(len(levels)):
        out += (tl.fma(levels[part], scale[:, None], values[part]),)
    return out
