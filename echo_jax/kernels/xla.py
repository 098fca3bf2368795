"""The definition of the codec in plain ``jax.numpy``, which XLA compiles anywhere."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8

from echo_jax.typing import (
    Blocks,
    Payload,
    Payloads,
    RanksPayloads,
    ReduceResidual,
    Rows,
    SendResidual,
)
from echo_jax.wire import blocks as blocking
from echo_jax.wire import compact, packing, quantizer
from echo_jax.wire.blocks import Piece
from echo_jax.wire.compact import Compact
from echo_jax.wire.format import WireFormat
from echo_jax.wire.rotation import rotate, transform, unrotate

# Sums over up to this many ranks are unrolled, so that XLA fuses them into one pass.
_UNROLL_RANKS = 16


def send(
    x: Rows,
    residual: SendResidual | Compact | None,
    *,
    fmt: WireFormat,
    chunks: int,
    piece: Piece | None = None,
) -> tuple[Payloads, SendResidual | Compact | None]:
    """See :class:`echo_jax.kernels.api.Codec`."""
    values = blocking.to_blocks(x.astype(jnp.float32), fmt.block_size, chunks)
    values = rotate(blocking.take_piece(values, piece, axis=1), fmt)
    owed = blocking.take_piece(residual, piece, axis=1)
    payloads, owed = _encode_with_feedback(values, owed, fmt)
    return payloads, blocking.put_piece(residual, owed, piece, axis=1)


def reduce(
    payloads: Payloads,
    residual: ReduceResidual | Compact | None,
    *,
    fmt: WireFormat,
    piece: Piece | None = None,
) -> tuple[Payload, ReduceResidual | Compact | None]:
    """See :class:`echo_jax.kernels.api.Codec`."""
    total = _sum_in_rank_order(payloads, lambda one: _decode(one, fmt))
    owed = blocking.take_piece(residual, piece, axis=0)
    payload, owed = _encode_with_feedback(total, owed, fmt)
    return payload, blocking.put_piece(residual, owed, piece, axis=0)


def return_(
    payloads: RanksPayloads,
    *,
    shape: tuple[int, int],
    dtype,
    fmt: WireFormat,
    stream: Rows | None = None,
    piece: Piece | None = None,
    out: Rows | None = None,
) -> Rows:
    """See :class:`echo_jax.kernels.api.Codec`."""
    values = _sum_in_rank_order(payloads, lambda one: _decode_exactly(one, fmt))
    chunks = payloads.shape[1]
    if stream is not None:
        old = blocking.to_blocks(stream.astype(jnp.float32), fmt.block_size, chunks)
        values = blocking.take_piece(old, piece, axis=1) + values
    values = values.astype(dtype)
    if piece is not None:
        earlier = jnp.zeros(shape, dtype) if out is None else out
        earlier = blocking.to_blocks(earlier, fmt.block_size, chunks)
        values = blocking.put_piece(earlier, values, piece, axis=1)
    return blocking.from_blocks(values, shape)


def sum_chunks(
    payloads: Payloads, *, shape: tuple[int, int], dtype, fmt: WireFormat
) -> Rows:
    """See :class:`echo_jax.kernels.api.Codec`."""
    total = _sum_in_rank_order(payloads, lambda one: _decode(one, fmt))
    total = unrotate(total, fmt)
    return blocking.from_blocks(total, shape).astype(dtype)


def _decode_exactly(payloads: Payloads, fmt: WireFormat) -> Blocks:
    """Dequantizes and rotates back without any rounding."""
    codes, scales = packing.split(payloads, fmt)
    values = quantizer.levels(codes, fmt)
    if fmt.rotate:
        # The transform is exact on odd halves, and so is scaling its result afterwards.
        values = transform(values)
        scales = scales * 2.0**-fmt.inverse_exponent
    return values * scales[..., None]


def _encode_with_feedback(values: Blocks, residual, fmt: WireFormat):
    """Quantizes ``values + residual``; returns the payload and its rounding error."""
    if residual is not None:
        values = values + compact.expand(residual)
    codes, scales = quantizer.encode(values, fmt)
    payload = packing.join(codes, scales, fmt)
    if residual is None:
        return payload, None
    if isinstance(residual, Compact):
        return payload, compact.compress(values, codes, scales, fmt, type(residual))
    decoded = quantizer.decode(codes, scales, fmt)
    error = quantizer.rounding_error(values, decoded)
    return payload, error.astype(residual.dtype)


def _decode(payloads: Payload | Payloads, fmt: WireFormat) -> Blocks:
    """Dequantizes; stays rotated."""
    return quantizer.decode(*packing.split(payloads, fmt), fmt)


def _sum_in_rank_order(payloads: UInt8[Array, "ranks ..."], decode) -> Blocks:
    """Adds what the ranks sent in float32, always in the order of ranks."""

    def chunk(rank):
        return decode(jax.lax.dynamic_index_in_dim(payloads, rank, keepdims=False))

    ranks = payloads.shape[0]
    if ranks > _UNROLL_RANKS:
        return jax.lax.fori_loop(
            1, ranks, lambda rank, total: total + chunk(rank), chunk(0)
        )
    total = chunk(0)
    for rank in range(1, ranks):
        total = total + chunk(rank)
    return total
