"""The steps of the Triton kernels on one tile; see ``triton_kernels.py``."""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from echo_jax.wire.format import WireFormat

_SMALLEST_SCALE = tl.constexpr(2.0**-120)
_LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
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
def _add_parts(left, right):
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
        parts = _load_plane(owed, row, inside, 4, SIZE // 2, SIZE, WIDTH)
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
        levels = _levels(parts, (), 4)
        doubled = ()
        for part in tl.static_range(len(levels)):
            doubled += (levels[part] - (1.0 - 2.0**-6),)
        values = add_scaled(values, doubled, scale * (0.5 / (15 - 2.0**-6)))
    elif KIND == "float":
        values = _add_parts(values, to_float(parts))
    return values


@triton.jit
def _larger(left, right):
    """The maximum of two values; NaN if either is NaN."""
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_scales(values, SCALE_FACTOR: tl.constexpr):
    """The scale of each block: zero if too small, NaN if the block is not finite."""
    peak = tl.abs(values[0])
    for part in tl.static_range(1, len(values)):
        peak = _larger(peak, tl.abs(values[part]))
    peak = tl.reduce(peak, 1, _larger)
    scale = _cast(peak * SCALE_FACTOR, tl.bfloat16).to(tl.float32)
    scale = tl.where(scale < _SMALLEST_SCALE, 0.0, scale)
    return tl.where(peak <= _LARGEST_FLOAT, scale, float("nan"))


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
        _store_plane(steps, owed, row, inside, 4, SIZE // 2, SIZE, WIDTH)
    _store_codes(codes, body, row, inside, BITS, SIZE, WIDTH)
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
def _store_codes(
    codes,
    body,
    row,
    inside,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Packs the codes of each block and writes them, one plane or two."""
    code_bytes: tl.constexpr = SIZE * BITS // 8
    low: tl.constexpr = _low_bits(BITS)
    if low == BITS:
        _store_plane(codes, body, row, inside, BITS, code_bytes, SIZE, WIDTH)
    else:
        lower = ()
        upper = ()
        for part in tl.static_range(len(codes)):
            lower += (codes[part] & ((1 << low) - 1),)
            upper += (codes[part] >> low,)
        _store_plane(lower, body, row, inside, low, code_bytes, SIZE, WIDTH)
        body += SIZE * low // 8
        _store_plane(upper, body, row, inside, BITS - low, code_bytes, SIZE, WIDTH)


@triton.constexpr_function
def _low_bits(bits):
    """Bits of a code in the first plane of its block; all but for 3 and 6 bits."""
    return WireFormat(bits=bits).planes[0]


@triton.jit
def _store_plane(
    codes,
    plane,
    row,
    inside,
    BITS: tl.constexpr,
    STRIDE: tl.constexpr,  # bytes from one block's plane to the next one's
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Packs the parts that share bytes and writes them."""
    width: tl.constexpr = min(WIDTH, SIZE * BITS // 8)
    bits: tl.constexpr = BITS * WIDTH // width
    parts_per_slot: tl.constexpr = SIZE * BITS // 8 // width
    for part in tl.static_range(parts_per_slot):
        packed = codes[part]
        for slot in tl.static_range(1, 8 // bits):
            packed = packed | (codes[slot * parts_per_slot + part] << (bits * slot))
        if width < WIDTH:
            packed = packed << _half_shifts(BITS, WIDTH)
            packed = tl.reshape(packed, (row.shape[0], WIDTH // width, width))
            packed = tl.sum(packed, axis=1)
        offsets = row[:, None] * STRIDE + part * width + tl.arange(0, width)[None, :]
        tl.store(plane + offsets, packed.to(tl.uint8), mask=inside[:, None])


@triton.jit
def read(
    body, tail, row, inside, BITS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """Levels ``2q + 1`` of each part, and half the scale of each block."""
    code_bytes: tl.constexpr = SIZE * BITS // 8
    low: tl.constexpr = _low_bits(BITS)
    packed = _load_plane(body, row, inside, low, code_bytes, SIZE, WIDTH)
    upper = ()
    if low != BITS:
        body += SIZE * low // 8
        upper = _load_plane(body, row, inside, BITS - low, code_bytes, SIZE, WIDTH)
    levels = _levels(packed, upper, BITS)
    return levels, tl.load(tail + row, mask=inside, other=0.0).to(tl.float32) * 0.5


@triton.jit
def _load_plane(
    plane,
    row,
    inside,
    BITS: tl.constexpr,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The packed bytes of a plane of each block, in parts."""
    width: tl.constexpr = min(WIDTH, SIZE * BITS // 8)
    packed = ()
    for part in tl.static_range(SIZE * BITS // 8 // width):
        offsets = row[:, None] * STRIDE + part * width
        if width < WIDTH:
            offsets += (tl.arange(0, WIDTH) % width)[None, :]
        else:
            offsets += tl.arange(0, WIDTH)[None, :]
        loaded = tl.load(plane + offsets, mask=inside[:, None], other=0)
        if width < WIDTH:
            loaded = loaded >> _half_shifts(BITS, WIDTH).to(tl.uint8)
        packed += (loaded,)
    return packed


@triton.jit
def _half_shifts(BITS: tl.constexpr, WIDTH: tl.constexpr):
    """The slot of each half of a part in a plane that is half as wide, in bits."""
    return (BITS * (tl.arange(0, WIDTH) // (WIDTH // 2)))[None, :]


@triton.jit
def _levels(packed, upper, BITS: tl.constexpr):
    """The levels of all parts, in the order of slots, from packed bytes.

    ``upper`` are those of the second plane, if there is one.
    """
    low: tl.constexpr = _low_bits(BITS)
    levels = ()
    for slot in tl.static_range(8 // low):
        for part in tl.static_range(len(packed)):
            if low == BITS:
                levels += (_level(packed[part], slot, BITS),)
            else:
                levels += (_level_of_planes(packed, upper, part, slot, BITS),)
    return levels


@triton.jit
def _level(packed, SLOT: tl.constexpr, BITS: tl.constexpr):
    """The odd integer that the code in one slot of a byte stands for, as a float."""
    # The code is moved to the top of its byte, and that byte becomes the lowest byte of
    # the float 2**exponent, in which the code's lowest bit has the weight one. So no
    # conversion from integer to float is needed.
    exponent: tl.constexpr = 15 + BITS
    base: tl.constexpr = (127 + exponent) << 23
    shift: tl.constexpr = 8 - BITS * (SLOT + 1)
    mask: tl.constexpr = ((1 << BITS) - 1) << (8 - BITS)
    if _INTERPRETED:
        number = (((packed.to(tl.int32) << shift) & mask) | base).to(
            tl.float32, bitcast=True
        )
    else:
        number = _put_in_float(packed, shift, mask, base)
    middle: tl.constexpr = 2.0**exponent + (1 << (BITS - 1))
    if BITS == 8:  # 1 - 2 * middle would have too many bits for a float
        level = tl.fma(number - middle, 2.0, 1.0)
    else:
        level = tl.fma(number, 2.0, 1.0 - 2.0 * middle)
    return level


@triton.jit
def _put_in_float(packed, SHIFT: tl.constexpr, MASK: tl.constexpr, BASE: tl.constexpr):
    """Shifts and masks four bytes at once and puts each below the top bytes of BASE."""
    return tl.inline_asm_elementwise(
        asm=f"""
        {{
        .reg .b32 bytes;
        shl.b32 bytes, $4, {SHIFT};
        and.b32 bytes, bytes, {MASK * 0x01010101};
        prmt.b32 $0, bytes, {BASE}, 0x7650;
        prmt.b32 $1, bytes, {BASE}, 0x7651;
        prmt.b32 $2, bytes, {BASE}, 0x7652;
        prmt.b32 $3, bytes, {BASE}, 0x7653;
        }}
        """,
        constraints="=r,=r,=r,=r,r",
        args=[packed],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _level_of_planes(
    packed,
    upper,
    PART: tl.constexpr,
    SLOT: tl.constexpr,
    BITS: tl.constexpr,
):
    """The same as ``_level`` for a code in two planes."""
    # The low bits are at the top of the lowest byte of the float, as in _level, and the
    # high bits at the bottom of the byte above it, where they continue the code.
    low: tl.constexpr = _low_bits(BITS)
    exponent: tl.constexpr = 15 + low
    base: tl.constexpr = (127 + exponent) << 23
    left: tl.constexpr = 8 - low * (SLOT + 1)
    mask: tl.constexpr = ((1 << low) - 1) << (8 - low)
    number: tl.constexpr = SLOT * len(packed) + PART  # of the part, in its block
    slots: tl.constexpr = 8 // low * len(packed) // len(upper)
    right: tl.constexpr = number // len(upper) * (8 // slots)
    upper_mask: tl.constexpr = (1 << (BITS - low)) - 1
    bottom = packed[PART]
    top = upper[number % len(upper)]
    if _INTERPRETED:
        joined = (bottom.to(tl.int32) << left) & mask
        joined |= ((top.to(tl.int32) >> right) & upper_mask) << 8
        value = (joined | base).to(tl.float32, bitcast=True)
    else:
        value = _put_both_in_float(
            bottom, top, left, mask, right, upper_mask, base >> 16
        )
    middle: tl.constexpr = 2.0**exponent + (1 << (BITS - 1))
    return tl.fma(value, 2.0, 1.0 - 2.0 * middle)


@triton.jit
def _put_both_in_float(
    packed,
    upper,
    LEFT: tl.constexpr,
    MASK: tl.constexpr,
    RIGHT: tl.constexpr,
    UPPER_MASK: tl.constexpr,
    BASE: tl.constexpr,
):
    """Shifts and masks four bytes of each at once; puts pairs below BASE."""
    return tl.inline_asm_elementwise(
        asm=f"""
        {{
        .reg .b32 low, high, first, last;
        shl.b32 low, $4, {LEFT};
        and.b32 low, low, {MASK * 0x01010101};
        shr.b32 high, $5, {RIGHT};
        and.b32 high, high, {UPPER_MASK * 0x01010101};
        prmt.b32 first, low, high, 0x5140;
        prmt.b32 last, low, high, 0x7362;
        prmt.b32 $0, first, {BASE}, 0x5410;
        prmt.b32 $1, first, {BASE}, 0x5432;
        prmt.b32 $2, last, {BASE}, 0x5410;
        prmt.b32 $3, last, {BASE}, 0x5432;
        }}
        """,
        constraints="=r,=r,=r,=r,r,r",
        args=[packed, upper],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )


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
