"""The quantizer: the arithmetic that turns a block into codes and a scale.

With ``h = 2**(bits - 1)`` and ``M`` the block's largest magnitude, the scale ``s`` is
``M / (h - 1/2)`` rounded to bfloat16, the precision in which it is sent. A value ``v``
gets the code ``q = clip(floor(v / s), -h, h - 1)`` and is read back as
``(q + 1/2) s``. The levels are thus odd multiples of half a scale: they are symmetric,
use all ``2**bits`` codes, and reach far enough that no value is cut off at either end.
Codes are stored unsigned, ``q + h``.
"""

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax.typing import Blocks, Codes, Scales
from echo_jax.wire.format import WireFormat

# A smaller scale counts as zero, and a larger one as not finite, which only blocks of 2
# or 3 bits with values over 1e38 have. Between them, the reciprocal and half of a scale
# are normal floats.
MIN_SCALE, MAX_SCALE = 2.0**-120, 2.0**126

# Bit patterns of float32: the mask of the fraction; the number one; and the mask of the
# sign, the exponent and the upper half of the significand.
_FRACTION = np.uint32(0x007FFFFF)
_ONE = np.uint32(0x3F800000)
_LEADING = np.uint32(0xFFFFF000)


def scale_factor(fmt: WireFormat) -> np.float32:
    """The float32 constant that turns a block's largest magnitude into its scale."""
    return np.float32(1.0 / (fmt.half_levels - 0.5))


def block_scales(values: Blocks, fmt: WireFormat) -> Scales:
    """The scale of each block: zero if too small, NaN if too large or not finite."""
    peak = jnp.max(jnp.abs(values), axis=-1)
    # Not an astype to bfloat16 and back: GPU compilers remove such a pair, and the
    # codes and residual would then belong to another scale than the one that is sent.
    scales = jax.lax.reduce_precision(peak * scale_factor(fmt), 8, 7)
    scales = jnp.where(scales < MIN_SCALE, 0.0, scales)
    return jnp.where(scales <= MAX_SCALE, scales, jnp.nan)


def encode(values: Blocks, fmt: WireFormat) -> tuple[Codes, Scales]:
    """Codes and scales of each block of the last axis."""
    scales = block_scales(values, fmt)
    inverse = inverse_scales(scales)[..., None]
    half = fmt.half_levels
    level = jnp.floor(jnp.where(inverse > 0.0, values * inverse, 0.0))
    codes = jnp.clip(level, -half, half - 1) + half
    # Through int32, because every processor has a vector instruction for that step.
    return codes.astype(jnp.int32).astype(jnp.uint8), scales


def inverse_scales(scales: Scales) -> Scales:
    """Correctly rounded reciprocals; zero where the scale is zero or NaN.

    Division on a GPU can be off by two units in the last place. That would change the
    codes of values on the edge between two codes, where bfloat16 values often lie. One
    Newton step corrects it: the significand of a scale has only 8 bits, so that its
    products with the two halves of the reciprocal are exact, and hence also the error
    that the step removes.
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
    """The levels ``q + 1/2`` that the codes stand for, in units of the scale."""
    # Through int32 as in encode.
    codes = codes.astype(jnp.int32).astype(jnp.float32)
    return codes - np.float32(fmt.half_levels - 0.5)


def decode(codes: Codes, scales: Scales, fmt: WireFormat) -> Blocks:
    """The values that codes and scales stand for, exact in float32."""
    return levels(codes, fmt) * scales[..., None]


def rounding_error(values: Blocks, decoded: Blocks) -> Blocks:
    """The rounding error; zero where the decoded value is not finite.

    A NaN or infinity thus does not reach later calls through the residual. Rounding the
    scale can also carry a value at the very end of float32's range over it.
    """
    return jnp.where(jnp.isfinite(decoded), values - decoded, 0.0)
