"""The vocabulary of shapes and axis names used in signatures.

Shapes inside ``jax.shard_map`` and ``jax.vmap(axis_name=...)`` are those of one rank.
"""

from collections.abc import Hashable
from typing import TypeAlias

import numpy as np
from jax import Array
from jaxtyping import Float, Float32, UInt8

AxisName: TypeAlias = Hashable | tuple[Hashable, ...]
"""One mesh (or ``vmap``) axis, or several that act as one, the first the slowest."""

Shape: TypeAlias = tuple[int, ...]

AnyFloat: TypeAlias = Float[Array, "..."]
"""Any rank, float32, bfloat16 or float16."""

FloatLike: TypeAlias = AnyFloat | Float[np.ndarray, "..."] | float
"""What the public functions take for it."""

Rows: TypeAlias = Float[Array, "rows width"]
"""A tensor flattened to its last axis; blocks run along ``width``."""

Blocks: TypeAlias = Float32[Array, "*batch block"]
"""Values in block coordinates: rotated when the format rotates, padded."""

Codes: TypeAlias = UInt8[Array, "*batch block"]
"""Unsigned codes, one a byte, before packing."""

Scales: TypeAlias = Float32[Array, "*batch"]
"""One scale a block, representable in bfloat16."""

Payload: TypeAlias = UInt8[Array, "payload_bytes"]
"""What travels to one destination: the codes of all blocks, then their scales."""

Payloads: TypeAlias = UInt8[Array, "chunks payload_bytes"]
"""One payload for (or from) each rank."""

RanksPayloads: TypeAlias = UInt8[Array, "ranks chunks payload_bytes"]
"""The payloads of all chunks from each rank, as one shot gathers them."""

SendResidual: TypeAlias = Float[Array, "chunks blocks block"]
ReduceResidual: TypeAlias = Float[Array, "blocks block"]
