"""Which gradients travel in few bits, and in which messages."""

import dataclasses
import math
import zlib
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from echo_jax import axes
from echo_jax.collectives import traffic
from echo_jax.config import EchoConfig
from echo_jax.layers.partitioning import Specs
from echo_jax.training.buckets import Bucket, make_buckets


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientSyncConfig:
    """How gradients cross the data axis.

    Raises:
        ValueError: if a size is negative, or a bucket could hold nothing.
    """

    # Format, feedback and residual of the messages. A message under its min_bytes is
    # exact, as is everything if it is configured to be exact.
    sums: EchoConfig = EchoConfig()
    # A leaf with fewer bytes, counted in float32 on one rank, is averaged exactly:
    # vectors such as the scales of norms, a thousandth of all bytes.
    min_leaf_bytes: int = 1 << 16
    # Most bytes of float32 gradients that leaves fill together in one message; a
    # larger leaf is a message of its own. Large enough for links to run at full rate,
    # small enough that the copy is small beside a large model's gradients.
    bucket_bytes: int = 1 << 28
    # A step with a gradient that is not finite leaves every rank's residual as it was.
    # To be turned off where the training step restores its whole state itself.
    keep_on_nonfinite: bool = True

    def __post_init__(self):
        if not isinstance(self.sums, EchoConfig):
            raise ValueError(f"sums={self.sums!r} must be an EchoConfig.")
        if self.min_leaf_bytes < 0 or self.bucket_bytes < 4:
            raise ValueError(
                f"min_leaf_bytes={self.min_leaf_bytes} must be at least 0 and "
                f"bucket_bytes={self.bucket_bytes} at least 4, one value."
            )


class GradientPlan(NamedTuple):
    """How the leaves of a tree travel."""

    buckets: tuple[Bucket, ...]
    exact: tuple[int, ...]  # places of the leaves that are averaged exactly
    others: tuple[Hashable, ...]  # the other axes that parameters are sharded over


def plan_gradients(
    tree: Any,
    own: tuple[Hashable, ...],
    *,
    ranks: int,
    config: GradientSyncConfig,
    specs: Specs | None,
) -> GradientPlan:
    """Sorts the leaves of one rank's tree into messages.

    A leaf is sent in few bits if it is large, and if it is sharded over each of the
    other mesh axes over which any leaf is sharded. A leaf that is replicated over such
    an axis must stay the same on all its ranks, which it would not: every rank rounds
    its messages with a residual of its own.

    Args:
      tree: parameters or gradients, arrays or shapes.
      own: the data axes.
      ranks: their size; nothing is rounded where there is one.
      config: formats and sizes.
      specs: how the leaves are sharded; None to go by their types.
    """
    leaves, structure = jax.tree.flatten(tree)
    if specs is None:
        names = [_varying(leaf) for leaf in leaves]
    else:
        names = [set(names_in([s])) for s in structure.flatten_up_to(specs)]
    cut = [frozenset(found) - frozenset(own) for found in names]
    others: frozenset[Hashable] = frozenset().union(*cut)
    large = [
        (place, tuple(leaf.shape))
        for place, leaf in enumerate(leaves)
        if ranks > 1
        and cut[place] == others
        and 4 * math.prod(leaf.shape) >= max(config.min_leaf_bytes, 1)
    ]
    buckets = make_buckets(
        large,
        bucket_bytes=config.bucket_bytes,
        block_size=config.sums.format.block_size,
    )
    # What would be exact as a whole needs no bucket.
    buckets = tuple(
        bucket
        for bucket in buckets
        if not traffic.takes_exact_path(bucket.shape, "float32", config.sums)
    )
    rounded = {place for bucket in buckets for place in bucket.leaves}
    exact = tuple(place for place in range(len(leaves)) if place not in rounded)
    return GradientPlan(buckets, exact, tuple(sorted(others, key=str)))


def fingerprint(plan: GradientPlan, config: GradientSyncConfig) -> int:
    """A number for everything but the data axis that a residual belongs to."""
    fmt = config.sums.format
    kind = (fmt.block_size, fmt.rotate, config.sums.residual_dtype)
    parts = [(bucket.leaves, bucket.shapes) for bucket in plan.buckets]
    return zlib.crc32(repr((kind, parts)).encode())


def names_in(specs: Sequence[PartitionSpec]) -> list[Hashable]:
    """Axis names of specs, each once, in the order of their names."""
    entries = [entry for spec in specs for entry in spec if entry is not None]
    return sorted({n for entry in entries for n in axes.axis_names(entry)}, key=str)


def _varying(leaf: Any) -> frozenset[Hashable]:
    """Axes along which an array differs; none where only a shape is known."""
    return axes.varying_axes(leaf) if isinstance(leaf, jax.Array) else frozenset()
