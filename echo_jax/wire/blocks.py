"""From a tensor of any shape to chunks of blocks, and back.

Blocks run along the last axis and never span two rows, so that one token never depends
on another. The last block of a row is padded with zeros. Each rank sums one chunk; all
chunks have the same number of blocks, the last ones filled up with blocks of zeros.
"""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from echo_jax.typing import AnyFloat, Rows, Shape

# Pieces of at least this many blocks begin at a multiple of it, so that their codes are
# aligned for the widest loads.
_PIECE_BLOCKS = 64


class Piece(NamedTuple):
    """A run of blocks, the same one in the chunk of every rank."""

    start: int
    stop: int


def row_shape(shape: Shape) -> tuple[int, int]:
    """``(rows, width)``: the shape flattened to its last axis (a scalar is one row)."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def num_blocks(shape: Shape, block_size: int) -> int:
    """Number of blocks of a tensor of this shape, partly filled ones included."""
    rows, width = row_shape(shape)
    return rows * -(-width // block_size)


def blocks_per_chunk(shape: Shape, block_size: int, chunks: int) -> int:
    """Number of blocks in each of ``chunks`` equal chunks, padding included."""
    return -(-num_blocks(shape, block_size) // chunks)


def to_blocks(x: Rows, block_size: int, chunks: int) -> AnyFloat:
    """Cuts rows into ``(chunks, blocks, block_size)``, padded with zeros."""
    rows, width = x.shape
    per_row = -(-width // block_size)
    x = jnp.pad(x, ((0, 0), (0, per_row * block_size - width)))
    x = x.reshape(rows * per_row, block_size)
    missing = -x.shape[0] % chunks
    x = jnp.pad(x, ((0, missing), (0, 0)))
    return x.reshape(chunks, -1, block_size)


def from_blocks(blocks: AnyFloat, shape: tuple[int, int]) -> Rows:
    """Inverse of :func:`to_blocks` for rows of the given ``(rows, width)``."""
    rows, width = shape
    block_size = blocks.shape[-1]
    per_row = -(-width // block_size)
    x = blocks.reshape(-1, block_size)[: rows * per_row]
    return x.reshape(rows, per_row * block_size)[:, :width]


def cut_pieces(blocks: int, count: int) -> list[Piece | None]:
    """Cuts a chunk into ``count`` pieces, but no more than it has blocks.

    Returns:
      The pieces in order. A single piece is ``None``, which stands for the whole chunk.
    """
    unit = _PIECE_BLOCKS if blocks >= count * _PIECE_BLOCKS else 1
    count = max(1, min(count, blocks))
    edges = [blocks * index // count // unit * unit for index in range(count)]
    if count == 1:
        return [None]
    return [Piece(*run) for run in itertools.pairwise([*edges, blocks])]


def take_piece(tree, piece: Piece | None, *, axis: int):
    """Every leaf cut down to the blocks of the piece; blocks lie along ``axis``."""
    if piece is None:
        return tree
    return jax.tree.map(
        lambda leaf: jax.lax.slice_in_dim(leaf, *piece, axis=axis), tree
    )


def put_piece(tree, part, piece: Piece | None, *, axis: int):
    """``tree`` with the blocks of the piece replaced by ``part``."""
    if piece is None:
        return part

    def put(leaf, run):
        # On CPUs, arrays of bytes are updated in place; arrays of 8-bit floats are
        # converted to a wider float and back.
        if leaf.dtype.itemsize == 1:
            leaf, run = (
                jax.lax.bitcast_convert_type(a, jnp.uint8) for a in (leaf, run)
            )
        return jax.lax.dynamic_update_slice_in_dim(leaf, run, piece.start, axis)

    return jax.tree.map(
        lambda leaf, run: jax.lax.bitcast_convert_type(put(leaf, run), leaf.dtype),
        tree,
        part,
    )
