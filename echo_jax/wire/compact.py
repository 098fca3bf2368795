"""The compact residual: one byte a value and one scale a block.

What one rounding left out of a block lies within half its scale ``s`` of zero, so the
scale is the natural unit: a value ``e`` is kept as the integer ``round(255 e/s)``, of
+-127 at most, with the scale itself, in bfloat16, beside its block. At most ``s/510``
is lost.

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

# A residual must be of a float dtype to be its own cotangent, so the signed bytes hide
# in an 8-bit float. In this one every byte but 0x80 is a number, and -128 never occurs:
# whatever copies, selects or adds zero to the array as floats keeps the bytes.
CONTAINER = jnp.float8_e4m3fnuz
STEPS = 255  # steps of the residual in one scale; the largest integer is 127
# A hair fewer going in: a position may have been rounded up to the next code's, 1.
STEPS_IN = 255.0 - 2.0**-6


class Compact(NamedTuple):
    """A residual in one byte a value; zeros owe nothing."""

    codes: Float[Array, "*batch block"]  # signed bytes in the bits of CONTAINER
    scales: BFloat16[Array, "*batch"]  # the scale of the block that left them

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values that it stands for."""
        return self.codes.shape


def zeros(shape: tuple[int, ...]) -> Compact:
    """A compact residual that owes nothing."""
    return Compact(jnp.zeros(shape, CONTAINER), jnp.zeros(shape[:-1], jnp.bfloat16))


def compress(values: Blocks, codes: Codes, scales: Scales, fmt: WireFormat) -> Compact:
    """What ``codes`` left out of ``values``."""
    inverse = quantizer.inverse_scales(scales)
    usable = inverse > 0.0
    # Of the position p within the step of its code, from 0 to 1, round(255 (p - 1/2))
    # is floor(255 p) - 127: nothing to clip.
    position = values * inverse[..., None]
    position = position - (codes.astype(jnp.float32) - fmt.half_levels)
    steps = jnp.where(usable[..., None], position, 0.5)
    steps = jnp.floor(steps * STEPS_IN) - STEPS // 2
    kept = jnp.where(usable, scales, 0.0).astype(jnp.bfloat16)
    return Compact(from_bytes(steps.astype(jnp.int32).astype(jnp.int8)), kept)


def expand(residual: Float[Array, "*batch block"] | Compact) -> Blocks:
    """The values of a residual, compact or not, in float32."""
    if not isinstance(residual, Compact):
        return residual.astype(jnp.float32)
    unit = residual.scales.astype(jnp.float32) * np.float32(1.0 / STEPS)
    return to_bytes(residual.codes).astype(jnp.float32) * unit[..., None]


def to_bytes(codes: Float[Array, "..."]) -> jax.Array:
    """The signed bytes behind the container, without a copy."""
    return jax.lax.bitcast_convert_type(codes, jnp.int8)


def from_bytes(signed: jax.Array) -> Float[Array, "..."]:
    """The container of signed bytes, without a copy."""
    return jax.lax.bitcast_convert_type(signed, CONTAINER)
