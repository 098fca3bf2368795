"""Codes packed into bytes, and scales as bytes.

In a plane of ``p`` bits, a byte holds ``8 // p`` codes. Byte ``j`` of a block's plane
holds the codes ``j, j + n, j + 2n, ...`` with ``n = block_size * p // 8``, the first in
the lowest bits. At 4 bits, for example, the low nibbles hold the first half of a block
and the high nibbles the second, so that kernels load contiguous runs of values and
never shuffle. Codes of three bits are stored as a plane of the two low bits and one of
the high bit, codes of six bits as planes of four and two.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from echo_jax.typing import Codes, Scales
from echo_jax.wire.format import SCALE_BYTES, WireFormat


def pack_codes(codes: Codes, fmt: WireFormat) -> UInt8[Array, "*batch code_bytes"]:
    """Packs the codes of each block into ``fmt.code_bytes`` bytes."""
    planes, shift = [], 0
    for width in fmt.planes:
        plane = (codes >> shift) & ((1 << width) - 1)
        slots = plane.reshape(*plane.shape[:-1], 8 // width, -1)
        packed = slots[..., 0, :]
        for slot in range(1, 8 // width):
            packed = packed | (slots[..., slot, :] << (slot * width))
        planes.append(packed)
        shift += width
    return planes[0] if len(planes) == 1 else jnp.concatenate(planes, axis=-1)


def unpack_codes(packed: UInt8[Array, "*batch code_bytes"], fmt: WireFormat) -> Codes:
    """Inverse of :func:`pack_codes`."""
    codes, start, shift = None, 0, 0
    for width in fmt.planes:
        plane_bytes = fmt.block_size * width // 8
        plane = packed[..., start : start + plane_bytes]
        slots = _slots(plane, width)
        values = slots[0] if width == 8 else jnp.concatenate(slots, axis=-1)
        codes = values if codes is None else codes | (values << shift)
        start, shift = start + plane_bytes, shift + width
    assert codes is not None
    return codes


def _slots(plane: UInt8[Array, "*batch n"], width: int) -> list[jax.Array]:
    """The codes of ``width`` bits in each byte, lowest first.

    Without shifts by nothing and masks that change nothing: XLA does not drop them all,
    and counts them when it decides whether a pass is worth a second thread.
    """
    moved = [plane, *(plane >> at for at in range(width, 8, width))]
    return [*(slot & ((1 << width) - 1) for slot in moved[:-1]), moved[-1]]


def pack_scales(scales: Scales) -> UInt8[Array, "*batch 2"]:
    """The bytes of each scale as bfloat16, little-endian."""
    return jax.lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.uint8)


def unpack_scales(packed: UInt8[Array, "*batch 2"]) -> Scales:
    """Inverse of :func:`pack_scales`."""
    return jax.lax.bitcast_convert_type(packed, jnp.bfloat16).astype(jnp.float32)


def join(
    codes: UInt8[Array, "*batch blocks block"],
    scales: Float32[Array, "*batch blocks"],
    fmt: WireFormat,
) -> UInt8[Array, "*batch payload_bytes"]:
    """One payload from ``(*batch, blocks, block)`` codes and their scales."""
    *batch, blocks = scales.shape
    # XLA fuses the packing into what follows. If that is a flat vector, a CPU finds the
    # place of each byte by division and without vector instructions, which takes much
    # longer than in rows of a block's bytes. The scales must fill such rows, and two
    # planes, which are put together first, are slower in rows.
    in_rows = len(fmt.planes) == 1 and SCALE_BYTES * blocks % fmt.code_bytes == 0
    rows = (-1, fmt.code_bytes) if in_rows else (-1,)
    body = pack_codes(codes, fmt).reshape(*batch, *rows)
    tail = pack_scales(scales).reshape(*batch, *rows)
    return jnp.concatenate([body, tail], axis=len(batch)).reshape(*batch, -1)


def split(
    payload: UInt8[Array, "*batch payload_bytes"], fmt: WireFormat
) -> tuple[
    UInt8[Array, "*batch blocks block"],
    Float32[Array, "*batch blocks"],
]:
    """Inverse of :func:`join`."""
    *batch, payload_bytes = payload.shape
    blocks = payload_bytes // fmt.block_bytes
    body = payload[..., : blocks * fmt.code_bytes]
    tail = payload[..., blocks * fmt.code_bytes :]
    codes = unpack_codes(body.reshape(*batch, blocks, fmt.code_bytes), fmt)
    return codes, unpack_scales(tail.reshape(*batch, blocks, SCALE_BYTES))
