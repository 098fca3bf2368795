"""The compact residuals: one byte or half a byte a value, and one scale a block.

What one rounding left out of a block lies within half its scale ``s`` of zero, so the
scale is the natural unit: with ``n`` a hair under 255 or 15, a value ``e`` is kept as
the number of its step out of ``n``, of +-127 or +-7 at most, with the scale itself, in
bfloat16, beside its block, and read back as the middle of that step. At most
``s/(2 n)`` is lost each time, at random: after ``L`` calls about ``sqrt(L)/n`` times
the error of one rounding, where the other residuals lose less.

A block that could not be sent at all keeps nothing: below the smallest scale, about
1e-36, a value is dropped, where the other residuals would keep it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float

from echo_jax.typing import Blocks, Codes, Scales
from echo_jax.wire import quantizer
from echo_jax.wire.format import WireFormat

# A residual must be of a float dtype to be its own cotangent, so the bytes hide in an
# 8-bit float. In this one every byte but 0x80 is a number, and 0x80 never occurs:
# whatever copies, selects or adds zero to the array as floats keeps the bytes.
CONTAINER = jnp.float8_e4m3fnuz
# Added to the integers that share a byte: one to fifteen, so that no byte is 0x80.
NIBBLE_OFFSET = 8
# By which there are fewer steps in a scale than numbers for them: a position in a step
# of the code may have been rounded up to 1.
HAIR = 2.0**-6
# Added to a number to have the middle of its step. Without it what is lost has a mean,
# the same on every rank and in every call, that outgrows the random part.
MIDDLE = HAIR / 2


class Compact(NamedTuple):
    """A residual in one byte a value; zeros owe nothing."""

    codes: Float[Array, "*batch block_bytes"]  # signed bytes in the bits of CONTAINER
    scales: BFloat16[Array, "*batch"]  # the scale of the block that left them

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values that it stands for."""
        return self.codes.shape


class Nibbles(Compact):
    """A residual in half a byte a value: the halves of a block share its bytes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values that it stands for."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])


def steps_of(kind: type[Compact]) -> int:
    """Steps of the residual in one scale, an odd number."""
    return 15 if issubclass(kind, Nibbles) else 255


def steps_in(kind: type[Compact]) -> float:
    """The same, a hair fewer."""
    return steps_of(kind) - HAIR


def zeros(shape: tuple[int, ...], kind: type[Compact] = Compact) -> Compact:
    """A compact residual that owes nothing."""
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
    """What ``codes`` left out of ``values``."""
    inverse = quantizer.inverse_scales(scales)
    usable = inverse > 0.0
    # Of the position p within the step of its code, from 0 to 1, round(n (p - 1/2)) is
    # floor(n p) - floor(n/2): nothing to clip.
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
    # The first sum is exact, so that no contraction of the product can matter.
    return (steps.astype(jnp.float32) + MIDDLE) * unit[..., None]


def to_bytes(codes: Float[Array, "..."]) -> jax.Array:
    """The signed bytes behind the container, without a copy."""
    return jax.lax.bitcast_convert_type(codes, jnp.int8)


def from_bytes(signed: jax.Array) -> Float[Array, "..."]:
    """The container of signed bytes, without a copy."""
    return jax.lax.bitcast_convert_type(signed, CONTAINER)
