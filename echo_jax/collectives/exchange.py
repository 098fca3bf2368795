"""How payloads move between ranks; gradients and bit layouts are defined elsewhere.

An all-reduce in two shots has two steps: every rank sends chunk ``j`` of its tensor to
rank ``j`` (one ``all_to_all`` of uint8), which adds the chunks, quantizes the sum and
sends it to all ranks (one ``all_gather`` of uint8). Every rank, also the one that made
the sum, decodes it from the same bytes, so that the results are bit-identical. In one
shot, every rank sends all chunks to all ranks (one ``all_gather``), and each adds up
the same bytes in the same order.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from echo_jax import axes
from echo_jax.config import EchoConfig
from echo_jax.kernels import get_codec
from echo_jax.residual import Residual
from echo_jax.typing import AnyFloat, AxisName, Payload, Payloads, RanksPayloads
from echo_jax.wire import blocks as blocking

# Pieces whose sums are made before the first one is decoded: one is then on its way
# while the next one is summed.
_AHEAD = 2


def all_reduce(
    x: AnyFloat,
    residual: Residual | None,
    axis_name: AxisName,
    config: EchoConfig,
    *,
    add_to: AnyFloat | None = None,
) -> tuple[AnyFloat, Residual | None]:
    """Sum over the axis, added to ``add_to``; typed invariant where types are tracked.

    Decoding the sum adds the two in float32 and rounds once to x's dtype.

    With pieces, the stages of different ones take turns so that at any time one piece
    is on its way while the codec works on others. Which rank adds up a block does not
    depend on the number of pieces, so neither does any bit of the result.
    """
    ranks, shape = axes.axis_size(axis_name), blocking.row_shape(x.shape)
    codec, fmt = get_codec(config.backend, config.format), config.format
    blocks = blocking.blocks_per_chunk(shape, fmt.block_size, ranks)
    pieces = blocking.cut_pieces(blocks, config.num_chunks)
    stream = None if add_to is None else add_to.reshape(shape)
    decode = functools.partial(
        codec.return_, shape=shape, dtype=x.dtype, fmt=fmt, stream=stream
    )
    one_shot = config.algorithm == "one-shot"
    send = None if residual is None else residual.send
    reduce = None if residual is None else residual.reduce
    parts, send = _encode_pieces(
        x.reshape(shape),
        send,
        axis_name=axis_name,
        config=config,
        pieces=pieces,
        transport=_hand_out if one_shot else _exchange,
    )
    y = None
    if one_shot:  # every rank has all chunks of all ranks
        for part, piece in zip(parts, pieces, strict=True):
            y = decode(part, piece=piece, out=y)
    else:
        add_up = functools.partial(codec.reduce, fmt=fmt)
        y, reduce = _add_up_chunks(
            parts, reduce, axis_name, pieces=pieces, add_up=add_up, decode=decode
        )
    assert y is not None  # cut_pieces returns at least one piece
    if residual is not None:
        residual = dataclasses.replace(residual, send=send, reduce=reduce)
    return y.reshape(x.shape), residual


def _add_up_chunks(
    parts, owed, axis_name: AxisName, *, pieces, add_up: Callable, decode: Callable
):
    """Every rank adds up its chunk and hands out the sum; also returns the residual."""
    sums, y = [], None
    for n, piece in enumerate(pieces):
        if n >= _AHEAD:
            y = decode(sums[n - _AHEAD], piece=pieces[n - _AHEAD], out=y)
            y, parts[n] = axes.in_turn(y, parts[n])
        total, owed = add_up(parts[n], owed, piece=piece)
        sums.append(_hand_out(total, axis_name)[None])
    for total, piece in list(zip(sums, pieces, strict=True))[-_AHEAD:]:
        y = decode(total, piece=piece, out=y)
    return y, owed


def reduce_scatter(
    x: AnyFloat, residual: Residual | None, axis_name: AxisName, config: EchoConfig
) -> tuple[AnyFloat, Residual | None]:
    """Sums over ranks; rank ``i`` keeps entry ``i`` of the leading axis.

    Values are quantized once, when they are sent: the sum itself does not travel.
    """
    codec, fmt = get_codec(config.backend, config.format), config.format
    chunk_shape = blocking.row_shape(x.shape[1:])
    rows = x.reshape(-1, chunk_shape[1])
    owed = None if residual is None else residual.send
    payloads, owed = codec.send(rows, owed, fmt=fmt, chunks=x.shape[0])
    payloads = _exchange(payloads, axis_name)
    total = codec.sum_chunks(payloads, shape=chunk_shape, dtype=x.dtype, fmt=fmt)
    if residual is not None:
        residual = dataclasses.replace(residual, send=owed)
    return total.reshape(x.shape[1:]), residual


def gather(
    x: AnyFloat, residual: Residual | None, axis_name: AxisName, config: EchoConfig
) -> tuple[AnyFloat, Residual | None]:
    """The tensors of all ranks along a new leading axis, each quantized once."""
    codec, fmt = get_codec(config.backend, config.format), config.format
    shape = blocking.row_shape(x.shape)
    blocks = blocking.num_blocks(x.shape, fmt.block_size)
    owed = None if residual is None else _first_blocks(residual.send, blocks)
    payloads, owed = codec.send(x.reshape(shape), owed, fmt=fmt, chunks=1)
    payloads = axes.all_gather(payloads[0], axis_name)
    ranks = payloads.shape[0]
    y = codec.return_(
        payloads[None], shape=(ranks * shape[0], shape[1]), dtype=x.dtype, fmt=fmt
    )
    if residual is not None:
        send = jax.tree.map(_pad_like, owed, residual.send)
        residual = dataclasses.replace(residual, send=send)
    return y.reshape(ranks, *x.shape), residual


def _encode_pieces(
    rows, owed, *, axis_name: AxisName, config: EchoConfig, pieces, transport
):
    """Encodes and transports one piece after the other; also returns the residual."""
    codec, fmt = get_codec(config.backend, config.format), config.format
    ranks, parts = axes.axis_size(axis_name), []
    for piece in pieces:
        part, owed = codec.send(rows, owed, fmt=fmt, chunks=ranks, piece=piece)
        if parts:  # transported one after the other, in this order
            part = axes.after(part, parts[-1])
        parts.append(transport(part, axis_name))
    return parts, owed


def _exchange(payloads: Payloads, axis_name: AxisName) -> Payloads:
    """Payload ``j`` goes to rank ``j``; row ``i`` of the result is from rank ``i``."""
    if not axes.is_tracked(axis_name):
        # Under vmap an operand that JAX knows to be alike on all ranks comes out of
        # lax.all_to_all with a wrong shape. Compilers drop the zero.
        zero = lax.axis_index(axis_name) * 0
        payloads = payloads | zero.astype(jnp.uint8)
    return lax.all_to_all(payloads, axis_name, split_axis=0, concat_axis=0, tiled=True)


def _hand_out(
    payload: Payload | Payloads, axis_name: AxisName
) -> Payloads | RanksPayloads:
    """Hands out what each rank has, the same to all by construction."""
    # Under a plain vmap JAX rejects to="invarying".
    to = "invarying" if axes.is_tracked(axis_name) else "varying"
    return axes.all_gather(payload, axis_name, to=to)


def _first_blocks(send, blocks: int):
    """The first ``blocks`` blocks, counted across chunks, as a single chunk."""
    return jax.tree.map(
        lambda leaf: leaf.reshape(1, -1, *leaf.shape[2:])[:, :blocks], send
    )


def _pad_like(owed, send):
    """Inverse of :func:`_first_blocks`: the blocks that were cut off are zeros."""
    missing = send.shape[0] * send.shape[1] - owed.shape[1]
    padding = [(0, 0), (0, missing)] + [(0, 0)] * (owed.ndim - 2)
    return jnp.pad(owed, padding).reshape(send.shape)
