"""Compact residuals: one byte or half a byte for each value, one scale for each block.

The rounding error of a value lies within half the block's scale ``s`` of zero, so that
the scale is its natural unit. The interval from ``-s/2`` to ``s/2`` is divided into
``n`` steps, ``n`` slightly below 255 or 15. An error is stored as the number of its
step, -127 to 127 or -7 to 7, and read back as the middle of that step. Each block also
stores its scale in bfloat16. Storing loses at most ``s/(2 n)`` each time, with random
sign: after ``L`` calls about ``sqrt(L)/n`` times the error of one rounding. Residuals
in bfloat16 or float32 lose less.

A block whose scale is below the smallest one, about 1e-36, is sent as zeros. Its values
are then dropped, where a residual of another dtype would keep them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float

from echo_jax.typing import Blocks, Codes, Scales
from echo_jax.wire import quantizer
from echo_jax.wire.format import WireFormat

# JAX wants a residual that is its own cotangent to have a float dtype, so the bytes are
# stored as 8-bit floats. In this type every byte but 0x80 is a number, and 0x80 never
# occurs here: copying, selecting or adding zero to the array as floats keeps all bytes.
CONTAINER = jnp.float8_e4m3fnuz
# Added to the two integers that share a byte. They then lie in 1 to 15, so that no byte
# is 0x80.
NIBBLE_OFFSET = 8
# Steps in a scale are this much fewer than 255 or 15. A value's position within the
# interval of its code may have been rounded up to 1, and must not give one step more.
HAIR = 2.0**-6
# Added to the number of a step to get its middle. Without it, the losses have a mean
# that is the same on every rank and in every call and soon outgrows their random part.
MIDDLE = HAIR / 2


class Compact(NamedTuple):
    """A residual in one byte for each value; scales of zero stand for zeros."""

    codes: Float[Array, "*batch block_bytes"]  # signed bytes in the bits of CONTAINER
    scales: BFloat16[Array, "*batch"]  # scale of the block when it was last rounded

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values that the codes stand for."""
        return self.codes.shape


class Nibbles(Compact):
    """A residual in half a byte for each value.

    A byte holds one value of the first half of a block and one of the second.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values that the codes stand for."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])


def steps_of(kind: type[Compact]) -> int:
    """Steps of the residual in one scale, an odd number."""
    return 15 if issubclass(kind, Nibbles) else 255


def steps_in(kind: type[Compact]) -> float:
    """The same, less HAIR: the number of steps that codes are computed with."""
    return steps_of(kind) - HAIR


def zeros(shape: tuple[int, ...], kind: type[Compact] = Compact) -> Compact:
    """A compact residual of zeros."""
    size = shape[-1] // 2 if issubclass(kind, Nibbles) else shape[-1]
    codes = jnp.zeros((*shape[:-1], size), CONTAINER)
    return kind(codes, jnp.zeros(shape[:-1], jnp.bfloat16))


def compress(
    values: Blocks,
    codes: Codes,
    scales: Scales,
    fmt: WireFormat,
    kind: type[Compact] = Compact,
) -> Compact:
    """The rounding error of ``codes`` with respect to ``values``."""
    inverse = quantizer.inverse_scales(scales)
    usable = inverse > 0.0
    # With p from 0 to 1 the position of a value within the interval of its code,
    # round(n (p - 1/2)) equals floor(n p) - floor(n/2), which needs no clipping.
    position = values * inverse[..., None]
    position = position - (codes.astype(jnp.float32) - fmt.half_levels)
    position = jnp.where(usable[..., None], position, 0.5)
    steps = jnp.floor(position * steps_in(kind)) - steps_of(kind) // 2
    steps = steps.astype(jnp.int32)
    if issubclass(kind, Nibbles):
        low, high = jnp.split(steps + NIBBLE_OFFSET, 2, axis=-1)
        steps = low | (high << 4)
    kept = jnp.where(usable, scales, 0.0).astype(jnp.bfloat16)
    return kind(from_bytes(steps.astype(jnp.int8)), kept)


def expand(residual: Float[Array, "*batch block"] | Compact) -> Blocks:
    """The values of a residual, compact or not, in float32."""
    if not isinstance(residual, Compact):
        return residual.astype(jnp.float32)
    kind = type(residual)
    steps = to_bytes(residual.codes).astype(jnp.int32)
    if issubclass(kind, Nibbles):
        halves = [steps & 0xF, (steps >> 4) & 0xF]
        steps = jnp.concatenate(halves, axis=-1) - NIBBLE_OFFSET
    unit = residual.scales.astype(jnp.float32) * np.float32(1.0 / steps_in(kind))
    # The sum is exact in float32, so that fusing it with the product changes no bit.
    return (steps.astype(jnp.float32) + MIDDLE) * unit[..., None]


def to_bytes(codes: Float[Array, "..."]) -> jax.Array:
    """The signed bytes behind the container, without a copy."""
    return jax.lax.bitcast_convert_type(codes, jnp.int8)


def from_bytes(signed: jax.Array) -> Float[Array, "..."]:
    """The container of signed bytes, without a copy."""
    return jax.lax.bitcast_convert_type(signed, CONTAINER)
