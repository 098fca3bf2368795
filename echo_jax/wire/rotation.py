"""The block rotation: a Hadamard matrix scaled by powers of two.

``H`` has entries +-1 and ``H @ H = block_size * I``. A block is multiplied by
``2**-floor(log2(B)/2) H`` to enter block coordinates and by ``2**-ceil(log2(B)/2) H``
to leave them. Both factors are powers of two, also where ``sqrt(B)`` is not, so that
they cause no rounding. On the way out ``H`` acts on the levels of the codes, odd
halves, which is exact in float32 and therefore gives the same bits on every backend.

Source: Tseng et al., "QuIP#: Even Better LLM Quantization with Hadamard Incoherence and
Lattice Codebooks", 2024, for the use of the transform against outliers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax.typing import Blocks
from echo_jax.wire.format import WireFormat


@functools.cache
def hadamard(block_size: int) -> np.ndarray:
    """The Sylvester Hadamard matrix, entries +-1, symmetric, float32."""
    if block_size == 1:
        return np.ones((1, 1), np.float32)
    half = hadamard(block_size // 2)
    return np.block([[half, half], [half, -half]])


def transform(x: Blocks) -> Blocks:
    """``x @ H`` along the last axis, in float32 also where GPUs default to TF32."""
    return jnp.matmul(
        x,
        hadamard(x.shape[-1]),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def rotate(x: Blocks, fmt: WireFormat) -> Blocks:
    """Into block coordinates; the identity when the format does not rotate."""
    # Scaled before the transform, so that a block overflows only if its values come
    # within a factor of block_size * 2**-forward_exponent of the float32 limit.
    return transform(x * 2.0**-fmt.forward_exponent) if fmt.rotate else x


def unrotate(x: Blocks, fmt: WireFormat) -> Blocks:
    """Out of block coordinates; the identity when the format does not rotate."""
    return transform(x * 2.0**-fmt.inverse_exponent) if fmt.rotate else x
