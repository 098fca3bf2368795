"""How the Triton kernels read and write packed codes; see ``triton_kernels.py``."""

import triton
import triton.language as tl

from echo_jax.wire.format import WireFormat

# The interpreter runs no assembly.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.constexpr_function
def _low_bits(bits):
    """Bits of a code in the first plane of its block; all but for 3 and 6 bits."""
    return WireFormat(bits=bits).planes[0]


@triton.jit
def store_codes(
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
        store_plane(codes, body, row, inside, BITS, code_bytes, SIZE, WIDTH)
    else:
        lower = ()
        upper = ()
        for part in tl.static_range(len(codes)):
            lower += (codes[part] & ((1 << low) - 1),)
            upper += (codes[part] >> low,)
        store_plane(lower, body, row, inside, low, code_bytes, SIZE, WIDTH)
        body += SIZE * low // 8
        store_plane(upper, body, row, inside, BITS - low, code_bytes, SIZE, WIDTH)


@triton.jit
def store_plane(
    codes,
    plane,
    row,
    inside,
    BITS: tl.constexpr,
    STRIDE: tl.constexpr,  # bytes from one block's plane to the next one's
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Packs the values that share bytes and writes them."""
    # Narrower than a part where a byte holds values of both its halves.
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
def load_levels(
    body, row, inside, BITS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """Levels ``2q + 1`` of each part, from one plane or two."""
    code_bytes: tl.constexpr = SIZE * BITS // 8
    low: tl.constexpr = _low_bits(BITS)
    packed = load_plane(body, row, inside, low, code_bytes, SIZE, WIDTH)
    upper = ()
    if low != BITS:
        body += SIZE * low // 8
        upper = load_plane(body, row, inside, BITS - low, code_bytes, SIZE, WIDTH)
    return levels_of(packed, upper, BITS)


@triton.jit
def load_plane(
    plane,
    row,
    inside,
    BITS: tl.constexpr,
    STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The packed bytes of a plane of each block, in parts.

    Where a byte holds values of both halves of a part, both have it, and the right half
    has the slot of its own value where the left half has that of the left one.
    """
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
    """By how many bits the slots of a part's halves differ, for each of its values."""
    return (BITS * (tl.arange(0, WIDTH) // (WIDTH // 2)))[None, :]


@triton.jit
def levels_of(packed, upper, BITS: tl.constexpr):
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
