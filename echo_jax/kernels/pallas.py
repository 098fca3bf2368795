"""The kernels in Pallas' generic language, for GPUs where jax-triton is not installed.

The same stages as in ``triton_kernels.py``, written for clarity rather than speed;
Pallas' interpreter runs them on a CPU. They have no codes in two planes: on a GPU an
array of Pallas has a power of two of values, and a block has 3/8 or 3/4 as many bytes
as values. The tile size divides the number of blocks in a chunk, so that nothing is
masked: XLA pads partly filled blocks and the last chunk before the kernels run, and
removes the padding afterwards. Every array has a leading batch axis, see
:mod:`echo_jax.kernels.dispatch`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from echo_jax.wire import blocks as blocking
from echo_jax.wire import compact, quantizer
from echo_jax.wire.blocks import Piece
from echo_jax.wire.compact import Compact, Nibbles
from echo_jax.wire.format import SCALE_BYTES, WireFormat

_TILE = 32  # blocks of a program: 2048 values at the recommended block size
_NUM_WARPS = 4
_WHOLE = pl.BlockSpec(memory_space=pl.ANY)  # indexed by the kernel itself


def send(
    x,
    residual,
    *,
    fmt: WireFormat,
    chunks: int,
    piece: Piece | None = None,
    interpret: bool = False,
):
    """``(batch, rows, width)`` to ``(batch, chunks, payload)`` and the new residual."""
    values = blocking.take_piece(_cut(x, fmt, chunks), piece, axis=2)
    batch, _, blocks, size = values.shape
    old = blocking.take_piece(residual, piece, axis=2)
    merged = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), old)
    payloads, owed = _encode_call(
        _send_kernel,
        values.reshape(batch * chunks, blocks, size),
        _tiles(blocks, size),
        merged,
        fmt=fmt,
        blocks=blocks,
        interpret=interpret,
    )
    owed = jax.tree.map(lambda new, leaf: new.reshape(leaf.shape), owed, old)
    residual = blocking.put_piece(residual, owed, piece, axis=2)
    return payloads.reshape(batch, chunks, -1), residual


def reduce(
    payloads,
    residual,
    *,
    fmt: WireFormat,
    piece: Piece | None = None,
    interpret: bool = False,
):
    """``(batch, ranks, payload)`` to ``(batch, payload)`` and the new residual."""
    blocks = payloads.shape[-1] // fmt.block_bytes
    kernel = functools.partial(_reduce_kernel, ranks=payloads.shape[1])
    old = blocking.take_piece(residual, piece, axis=1)
    payload, owed = _encode_call(
        kernel, payloads, _WHOLE, old, fmt=fmt, blocks=blocks, interpret=interpret
    )
    return payload, blocking.put_piece(residual, owed, piece, axis=1)


def return_(
    payloads,
    stream,
    out,
    *,
    shape,
    dtype,
    fmt: WireFormat,
    piece: Piece | None = None,
    interpret: bool = False,
):
    """``(batch, ranks, chunks, payload)`` to ``(batch, rows, width)``, plus stream."""
    batch, ranks, chunks, payload_bytes = payloads.shape
    # All ranks of a chunk together: what one program adds up.
    payloads = jnp.swapaxes(payloads, 1, 2).reshape(batch * chunks, ranks, -1)
    blocks, size = payload_bytes // fmt.block_bytes, fmt.block_size
    extent = (batch * chunks, blocks, size)
    inputs, specs = [payloads], [_WHOLE]
    if stream is not None:
        old = blocking.take_piece(_cut(stream, fmt, chunks), piece, axis=2)
        inputs.append(old.reshape(extent))
        specs.append(_tiles(blocks, size))
    rows = _call(
        functools.partial(_return_kernel, fmt=fmt, blocks=blocks, ranks=ranks),
        inputs,
        specs,
        [_like(jax.ShapeDtypeStruct(extent, dtype), payloads)],
        [_tiles(blocks, size)],
        grid=(batch * chunks, blocks // _tile(blocks)),
        interpret=interpret,
        name="echo_return",
    )[0]
    rows = rows.reshape(batch, chunks, blocks, size)
    if piece is not None:
        earlier = jnp.zeros((batch, *shape), dtype) if out is None else out
        rows = blocking.put_piece(_cut(earlier, fmt, chunks), rows, piece, axis=2)
    return jax.vmap(lambda one: blocking.from_blocks(one, shape))(rows)


def _encode_call(kernel, source, spec, residual, *, fmt, blocks: int, interpret: bool):
    """Runs a kernel that writes one payload for each leading entry of ``source``."""
    payload_shape = (source.shape[0], blocks * fmt.block_bytes)
    owed, tree = jax.tree.flatten(_uncontained(residual))
    specs = [_tiles(blocks, *leaf.shape[2:]) for leaf in owed]
    payloads, *owed = _call(
        functools.partial(kernel, fmt=fmt, blocks=blocks),
        [source, *owed],
        [spec, *specs],
        [
            _like(jax.ShapeDtypeStruct(payload_shape, jnp.uint8), source),
            *(_like(leaf, source) for leaf in owed),
        ],
        [_WHOLE, *specs],
        grid=(source.shape[0], blocks // _tile(blocks)),
        input_output_aliases={1 + index: 1 + index for index in range(len(owed))},
        interpret=interpret,
        name="echo_reduce" if spec is _WHOLE else "echo_send",
    )
    return payloads, _contained(jax.tree.unflatten(tree, owed))


def _call(kernel, inputs, in_specs, outputs, out_specs, *, interpret: bool, **options):
    if not interpret:
        # Without these parameters, newer versions of JAX choose Mosaic GPU, whose
        # target is Hopper and which Ampere cannot be relied on to run.
        from jax.experimental.pallas import triton as pallas_triton

        options["compiler_params"] = pallas_triton.CompilerParams(num_warps=_NUM_WARPS)
    return pl.pallas_call(
        kernel,
        in_specs=in_specs,
        out_shape=outputs,
        out_specs=out_specs,
        interpret=interpret,
        **options,
    )(*inputs)


def _send_kernel(values_ref, *refs, fmt: WireFormat, blocks: int):
    values = values_ref[...].astype(jnp.float32)
    if fmt.rotate:
        values = _transform(values * 2.0**-fmt.forward_exponent)
    _encode(values, refs, fmt, blocks)


def _reduce_kernel(payloads_ref, *refs, fmt: WireFormat, blocks: int, ranks: int):
    message = pl.program_id(0)
    total = None
    for rank in range(ranks):
        levels, scales = _read(payloads_ref, (message, jnp.int32(rank)), fmt, blocks)
        one = levels * scales[:, None]
        total = one if total is None else total + one
    _encode(total, refs, fmt, blocks)


def _return_kernel(payloads_ref, *refs, fmt: WireFormat, blocks: int, ranks: int):
    *streams, rows_ref = refs

    def decoded(rank):
        index = (pl.program_id(0), jnp.int32(rank))
        levels, scales = _read(payloads_ref, index, fmt, blocks)
        if fmt.rotate:
            levels, scales = _transform(levels), scales * 2.0**-fmt.inverse_exponent
        return levels * scales[:, None]

    values = decoded(0)
    for rank in range(1, ranks):
        values = values + decoded(rank)
    for stream_ref in streams:
        values = stream_ref[...].astype(jnp.float32) + values
    rows_ref[...] = values.astype(rows_ref.dtype)


def _encode(values, refs, fmt: WireFormat, blocks: int) -> None:
    """Adds the residual, quantizes, writes the payload and the rounding error."""
    owed = refs[: len(refs) // 2]  # nothing, the values, or their codes and scales
    payload_ref, *left = refs[len(owed) :]
    halved = bool(owed) and owed[0].shape[-1] < fmt.block_size
    kind = Nibbles if halved else Compact
    count = compact.steps_of(kind)
    if len(owed) == 2:
        kept = owed[0][...]
        if halved:
            kept = _unpack(kept.astype(jnp.int32), 4) - compact.NIBBLE_OFFSET
        unit = np.float32(1.0 / compact.steps_in(kind))
        unit = owed[1][...].astype(jnp.float32) * unit
        middle = kept.astype(jnp.float32) + compact.MIDDLE
        values = values + middle * unit[:, None]
    elif owed:
        values = values + owed[0][...].astype(jnp.float32)
    scales, inverse = _scales(values, fmt)
    position = values * inverse[:, None]
    level = jnp.where(inverse[:, None] > 0.0, jnp.floor(position), 0.0)
    _write(payload_ref, level, scales, fmt, blocks)
    if len(left) == 2:
        steps = jnp.where(inverse[:, None] > 0.0, position - level, 0.5)
        steps = jnp.floor(steps * compact.steps_in(kind)) - count // 2
        steps = steps.astype(jnp.int32)
        if halved:
            steps = _pack(steps + compact.NIBBLE_OFFSET, 4)
        left[0][...] = steps.astype(jnp.int8)
        left[1][...] = jnp.where(inverse > 0.0, scales, 0.0).astype(jnp.bfloat16)
    elif left:
        decoded = (level + 0.5) * scales[:, None]
        error = jnp.where(jnp.isfinite(decoded), values - decoded, 0.0)
        left[0][...] = error.astype(left[0].dtype)


def _scales(values, fmt: WireFormat):
    """The scale of each block and its reciprocal, which is zero if it is not usable."""
    # The maximum on a GPU ignores NaN.
    magnitude = jnp.where(jnp.isnan(values), jnp.inf, jnp.abs(values))
    peak = jnp.max(magnitude, axis=1)
    bits = peak * quantizer.scale_factor(fmt)
    bits = jax.lax.bitcast_convert_type(bits, jnp.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)  # round to nearest bfloat16, ties to even
    scales = jax.lax.bitcast_convert_type(bits & np.uint32(0xFFFF0000), jnp.float32)
    scales = jnp.where(scales < quantizer.MIN_SCALE, 0.0, scales)
    scales = jnp.where(scales <= quantizer.MAX_SCALE, scales, jnp.nan)
    return scales, quantizer.inverse_scales(scales)


def _transform(x):
    """The Hadamard transform of each row.

    Each step adds and subtracts neighbours, then moves the sums to the first half and
    the differences to the second. This rotates the bits of the index: after as many
    steps as it has bits, each bit has been combined once and is back in its place.
    """
    tile, size = x.shape
    for _ in range(size.bit_length() - 1):
        even, odd = jnp.unstack(x.reshape(tile, size // 2, 2), axis=-1)
        pairs = jnp.stack([even + odd, even - odd], axis=-1)
        x = jnp.swapaxes(pairs, 1, 2).reshape(tile, size)
    return x


def _write(payload_ref, level, scales, fmt: WireFormat, blocks: int) -> None:
    """Packs codes and scales of a tile into its two sections of the payload."""
    entry, tile = pl.program_id(0), level.shape[0]
    codes = level.astype(jnp.int32) + fmt.half_levels
    codes = _pack(codes, fmt.bits)
    first = pl.program_id(1) * tile
    body = pl.ds(first * fmt.code_bytes, tile * fmt.code_bytes)
    payload_ref[entry, body] = codes.astype(jnp.uint8).reshape(-1)
    bits = jax.lax.bitcast_convert_type(scales, jnp.uint32)
    # Extracted byte by byte: through bfloat16 the low byte came out wrong on a GPU.
    for byte, at in enumerate(_scale_bytes(first, tile, fmt, blocks)):
        wanted = (bits >> (16 + 8 * byte)) & 0xFF
        payload_ref[entry, at] = wanted.astype(jnp.int32).astype(jnp.uint8)


def _read(payloads_ref, index, fmt: WireFormat, blocks: int):
    """Levels ``2q + 1`` of a tile of a payload, and half the scale of each block."""
    tile = _tile(blocks)
    first = pl.program_id(1) * tile
    body = pl.ds(first * fmt.code_bytes, tile * fmt.code_bytes)
    packed = payloads_ref[(*index, body)].reshape(tile, fmt.code_bytes)
    codes = _unpack(packed.astype(jnp.int32), fmt.bits)
    low, high = (
        payloads_ref[(*index, at)] for at in _scale_bytes(first, tile, fmt, blocks)
    )
    bits = (low.astype(jnp.uint32) << 16) | (high.astype(jnp.uint32) << 24)
    scales = jax.lax.bitcast_convert_type(bits, jnp.float32)
    odd = 2 * codes - (2 * fmt.half_levels - 1)
    return odd.astype(jnp.float32), scales * 0.5


def _pack(codes, bits: int):
    """Packs the parts of a block that share bytes."""
    slots = 8 // bits
    if slots == 1:
        return codes
    parts = jnp.swapaxes(codes.reshape(codes.shape[0], slots, -1), 1, 2)
    packed, *rest = _unstack(parts)
    for slot, part in enumerate(rest, start=1):
        packed = packed | (part << (slot * bits))
    return packed


def _unpack(packed, bits: int):
    """The inverse of :func:`_pack`."""
    slots = 8 // bits
    if slots == 1:
        return packed
    mask = (1 << bits) - 1
    parts = [(packed >> (slot * bits)) & mask for slot in range(slots)]
    return jnp.swapaxes(_stack(parts), 1, 2).reshape(packed.shape[0], -1)


def _scale_bytes(first, tile: int, fmt: WireFormat, blocks: int) -> list:
    """The places in a payload of the low and the high bytes of a tile's scales."""
    start = blocks * fmt.code_bytes + first * SCALE_BYTES
    return [pl.ds(start + byte, tile, SCALE_BYTES) for byte in range(SCALE_BYTES)]


def _stack(parts):
    """Stacks two or four parts along a new last axis, two at a time."""
    if len(parts) == 2:
        return jnp.stack(parts, axis=-1)
    pairs = jnp.stack([_stack(parts[0::2]), _stack(parts[1::2])], axis=-1)
    return pairs.reshape(*parts[0].shape, len(parts))


def _unstack(parts):
    """The inverse of :func:`_stack`."""
    if parts.shape[-1] == 2:
        return jnp.unstack(parts, axis=-1)
    pairs = parts.reshape(*parts.shape[:-1], parts.shape[-1] // 2, 2)
    even, odd = (_unstack(half) for half in jnp.unstack(pairs, axis=-1))
    return [part for pair in zip(even, odd, strict=True) for part in pair]


def _tile(blocks: int) -> int:
    """Blocks in a tile: the largest power of two up to _TILE that divides a chunk."""
    return math.gcd(blocks, _TILE)


def _tiles(blocks: int, *inner: int) -> pl.BlockSpec:
    """The block spec for a tile of whole blocks of one leading entry."""
    rest = (0,) * len(inner)
    return pl.BlockSpec((None, _tile(blocks), *inner), lambda i, j: (i, j, *rest))


def _cut(x, fmt: WireFormat, chunks: int):
    return jax.vmap(lambda one: blocking.to_blocks(one, fmt.block_size, chunks))(x)


def _like(leaf, source) -> jax.ShapeDtypeStruct:
    """The type of a result like ``leaf`` that varies along the axes of ``source``."""
    kind = jax.typeof(source).manual_axis_type
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, manual_axis_type=kind)


def _uncontained(residual):
    if isinstance(residual, Compact):
        return residual._replace(codes=compact.to_bytes(residual.codes))
    return residual


def _contained(residual):
    if isinstance(residual, Compact):
        return residual._replace(codes=compact.from_bytes(residual.codes))
    return residual
