"""The numeric contract: what a block of values becomes.

With ``h = 2**(bits - 1)``, ``M`` the block's largest magnitude and ``s`` the scale, a
value ``v`` gets the code ``q = clip(floor(v / s), -h, h - 1)`` and is read back as
``(2q + 1) s/2``: odd multiples of half a scale, symmetric, all ``2**bits`` codes used,
nothing clipped at either end. ``s = M / (h - 1/2)`` rounded to bfloat16, the precision
in which it travels. Codes are stored unsigned, ``q + h``.
"""

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax.typing import Blocks, Codes, Scales
from echo_jax.wire.format import WireFormat

# Below this a scale counts as zero: its reciprocal and its halves stay normal floats.
MIN_SCALE = 2.0**-120

# Of the bits of a positive float32: the fraction, the number one, and the sign,
# exponent and first half of the significand.
_FRACTION = np.uint32(0x007FFFFF)
_ONE = np.uint32(0x3F800000)
_LEADING = np.uint32(0xFFFFF000)


def scale_factor(fmt: WireFormat) -> np.float32:
    """The float32 constant that turns a block's largest magnitude into its scale."""
    return np.float32(1.0 / (fmt.half_levels - 0.5))


def block_scales(values: Blocks, fmt: WireFormat) -> Scales:
    """The scale of each block: zero if it is too small, NaN if it is not finite."""
    peak = jnp.max(jnp.abs(values), axis=-1)
    # Not an astype round trip: GPU compilers drop it, and the residual with it.
    scales = jax.lax.reduce_precision(peak * scale_factor(fmt), 8, 7)
    scales = jnp.where(scales < MIN_SCALE, 0.0, scales)
    return jnp.where(jnp.isfinite(peak), scales, jnp.nan)


def encode(values: Blocks, fmt: WireFormat) -> tuple[Codes, Scales]:
    """Codes and scales of each block of the last axis."""
    scales = block_scales(values, fmt)
    inverse = inverse_scales(scales)[..., None]
    half = fmt.half_levels
    level = jnp.floor(jnp.where(inverse > 0.0, values * inverse, 0.0))
    codes = jnp.clip(level, -half, half - 1) + half
    # By way of int32: that conversion is a vector instruction everywhere.
    return codes.astype(jnp.int32).astype(jnp.uint8), scales


def inverse_scales(scales: Scales) -> Scales:
    """Reciprocals, rounded as IEEE asks; zero where the scale is zero or NaN.

    Division on a GPU is off by up to two units in the last place, which decides the
    code of every value that lies on an edge, as many values of bfloat16 do. One Newton
    step from there is exact: a significand has 8 bits, so that both products with the
    halves of its reciprocal are exact, and with them the error.
    """
    usable = scales > 0.0
    bits = _to_bits(jnp.where(usable, scales, 1.0))
    significand = _from_bits((bits & _FRACTION) | _ONE)
    inverse = 1.0 / significand
    high = _from_bits(_to_bits(inverse) & _LEADING)
    error = (1.0 - significand * high) - significand * (inverse - high)
    power = _from_bits(2 * _ONE - (bits & ~_FRACTION))  # two to minus the exponent
    return jnp.where(usable, (inverse + inverse * error) * power, 0.0)


def _to_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _from_bits(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def levels(codes: Codes, fmt: WireFormat) -> Blocks:
    """The odd integers ``2q + 1`` that the codes stand for, in float32."""
    odd = 2 * codes.astype(jnp.int32) - (2 * fmt.half_levels - 1)
    return odd.astype(jnp.float32)


def decode(codes: Codes, scales: Scales, fmt: WireFormat) -> Blocks:
    """What a reader of codes and scales sees: exact in float32."""
    return levels(codes, fmt) * (scales * 0.5)[..., None]


def rounding_error(values: Blocks, decoded: Blocks, scales: Scales) -> Blocks:
    """What was not sent. A block that is not finite owes nothing: the next is clean."""
    return jnp.where(jnp.isfinite(scales)[..., None], values - decoded, 0.0)
