"""How payloads move between ranks. No gradients, no bit layout.

An all-reduce takes two shots: every rank sends chunk ``j`` of its tensor to rank ``j``
(one ``all_to_all`` of uint8), which adds the chunks and hands the sum to all (one
``all_gather`` of uint8). Every rank, the owner included, reads the sum from the same
bytes, so that the results are bit-identical.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from echo_jax import axes
from echo_jax.config import EchoConfig
from echo_jax.kernels import get_codec
from echo_jax.residual import Residual
from echo_jax.typing import AnyFloat, AxisName, Payload, Payloads
from echo_jax.wire import blocks as blocking


def all_reduce(
    x: AnyFloat,
    residual: Residual | None,
    axis_name: AxisName,
    config: EchoConfig,
    *,
    add_to: AnyFloat | None = None,
) -> tuple[AnyFloat, Residual | None]:
    """Sum over the axis, added to ``add_to``; typed invariant where types are tracked.

    The two are added in float32 and rounded once, where the sum is decoded.
    """
    ranks, shape = axes.axis_size(axis_name), blocking.row_shape(x.shape)
    rows, y = x.reshape(shape), None
    stream = None if add_to is None else add_to.reshape(shape)
    codec = get_codec(config.backend, config.format)
    blocks = blocking.blocks_per_chunk(shape, config.format.block_size, ranks)
    # The owner of a block is the same however many pieces there are, and so is every
    # bit. Pieces wait for each other only in the order of the calls of one stage.
    for piece in blocking.cut_pieces(blocks, config.num_chunks):
        payloads, residual = _sum_piece(rows, residual, axis_name, config, piece)
        y = codec.return_(
            payloads,
            shape=shape,
            dtype=x.dtype,
            fmt=config.format,
            stream=stream,
            piece=piece,
            out=y,
        )
    assert y is not None  # there is a piece, also of an empty tensor
    return y.reshape(x.shape), residual


def reduce_scatter(
    x: AnyFloat, residual: Residual | None, axis_name: AxisName, config: EchoConfig
) -> tuple[AnyFloat, Residual | None]:
    """Chunk ``i`` of the leading axis, summed, to rank ``i``, without that axis.

    One rounding: the sum stays in full precision where it is made.
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
    """The tensors of all ranks along a new leading axis, each rounded once."""
    codec, fmt = get_codec(config.backend, config.format), config.format
    shape = blocking.row_shape(x.shape)
    blocks = blocking.num_blocks(x.shape, fmt.block_size)
    owed = None if residual is None else _first_blocks(residual.send, blocks)
    payloads, owed = codec.send(x.reshape(shape), owed, fmt=fmt, chunks=1)
    payloads = lax.all_gather(payloads[0], axis_name, axis=0, tiled=False)
    ranks = payloads.shape[0]
    y = codec.return_(
        payloads, shape=(ranks * shape[0], shape[1]), dtype=x.dtype, fmt=fmt
    )
    if residual is not None:
        send = jax.tree.map(_pad_like, owed, residual.send)
        residual = dataclasses.replace(residual, send=send)
    return y.reshape(ranks, *x.shape), residual


def _sum_piece(rows, residual: Residual | None, axis_name, config, piece):
    """The two shots of one piece: its sum as every rank gets it, a chunk a row."""
    codec, fmt = get_codec(config.backend, config.format), config.format
    ranks = axes.axis_size(axis_name)
    send = None if residual is None else residual.send
    reduce = None if residual is None else residual.reduce
    payloads, send = codec.send(rows, send, fmt=fmt, chunks=ranks, piece=piece)
    payloads = _exchange(payloads, axis_name)
    payload, reduce = codec.reduce(payloads, reduce, fmt=fmt, piece=piece)
    if residual is not None:
        residual = dataclasses.replace(residual, send=send, reduce=reduce)
    return _gather_sum(payload, axis_name), residual


def _exchange(payloads: Payloads, axis_name: AxisName) -> Payloads:
    """Payload ``j`` goes to rank ``j``; row ``i`` of the result is from rank ``i``."""
    if not axes.is_tracked(axis_name):
        # Under vmap an operand that JAX knows to be alike on all ranks comes out of
        # lax.all_to_all with a wrong shape. Compilers drop the zero.
        zero = lax.axis_index(axis_name) * 0
        payloads = payloads | zero.astype(jnp.uint8)
    return lax.all_to_all(payloads, axis_name, split_axis=0, concat_axis=0, tiled=True)


def _gather_sum(payload: Payload, axis_name: AxisName) -> Payloads:
    """Hands out each rank's chunk of the sum, the same to all by construction."""
    # A plain vmap rejects to="invarying".
    to = "invarying" if axes.is_tracked(axis_name) else "varying"
    return lax.all_gather(payload, axis_name, axis=0, tiled=False, to=to)


def _first_blocks(send, blocks: int):
    """The first blocks of all chunks, as one chunk."""
    return jax.tree.map(
        lambda leaf: leaf.reshape(1, -1, *leaf.shape[2:])[:, :blocks], send
    )


def _pad_like(owed, send):
    """One chunk of some blocks in the shape of all chunks, nothing owed by the rest."""
    missing = send.shape[0] * send.shape[1] - owed.shape[1]
    padding = [(0, 0), (0, missing)] + [(0, 0)] * (owed.ndim - 2)
    return jnp.pad(owed, padding).reshape(send.shape)
