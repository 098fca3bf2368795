"""Many gradients as few messages: leaves in whole blocks, one after the other."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp

from echo_jax.typing import AnyFloat, Rows, Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Leaves that travel as one message."""

    leaves: tuple[int, ...]  # their places in the flattened tree
    shapes: tuple[Shape, ...]  # of each, on one rank
    block_size: int  # values in a block; every leaf begins with a block of its own

    @property
    def shape(self) -> tuple[int, int]:
        """``(blocks, block_size)`` of the message."""
        return sum(map(self._blocks, self.shapes)), self.block_size

    def join(self, leaves: Sequence[AnyFloat]) -> Rows:
        """The bucket's leaves of a flattened tree as rows of blocks, in float32."""
        rows = [
            self._rows(leaves[leaf], shape)
            for leaf, shape in zip(self.leaves, self.shapes, strict=True)
        ]
        return rows[0] if len(rows) == 1 else jnp.concatenate(rows)

    def cut(self, message: Rows) -> Iterator[tuple[int, AnyFloat]]:
        """``(place, values)`` of each leaf, in float32."""
        start = 0
        for leaf, shape in zip(self.leaves, self.shapes, strict=True):
            stop = start + self._blocks(shape)
            values = message[start:stop].reshape(-1)[: math.prod(shape)]
            yield leaf, values.reshape(shape)
            start = stop

    def _blocks(self, shape: Shape) -> int:
        return -(-math.prod(shape) // self.block_size)

    def _rows(self, leaf: AnyFloat, shape: Shape) -> Rows:
        flat = leaf.astype(jnp.float32).reshape(-1)
        missing = self._blocks(shape) * self.block_size - flat.size
        return jnp.pad(flat, (0, missing)).reshape(-1, self.block_size)


def make_buckets(
    leaves: Sequence[tuple[int, Shape]], *, bucket_bytes: int, block_size: int
) -> tuple[Bucket, ...]:
    """Groups leaves in their order, as many as fit; a larger leaf is alone in its own.

    Args:
      leaves: place and shape on one rank of each leaf.
      bucket_bytes: of float32 values, the most that several leaves fill together.
      block_size: values in a block.
    """
    groups: list[list[tuple[int, Shape]]] = []
    filled = bucket_bytes
    for place, shape in leaves:
        size = 4 * math.prod(shape)
        if filled + size > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append((place, shape))
        filled += size
    return tuple(
        Bucket(
            leaves=tuple(place for place, _ in group),
            shapes=tuple(shape for _, shape in group),
            block_size=block_size,
        )
        for group in groups
    )


def leading_axis(tree):
    """Every leaf with an axis of length 1 in front: one rank's part of a global one."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


def no_leading_axis(tree):
    """Inverse of :func:`leading_axis`."""
    return jax.tree.map(lambda leaf: leaf[0], tree)
