"""``quantize`` and ``dequantize``: the codec alone, without communication."""

import math

import jax.numpy as jnp

from echo_jax.config import Backend
from echo_jax.kernels.api import get_codec
from echo_jax.typing import AnyFloat, FloatLike, Payload, Shape
from echo_jax.wire import blocks as blocking
from echo_jax.wire.format import WireFormat, check_format


def quantize(
    x: FloatLike, fmt: WireFormat = WireFormat(), *, backend: Backend = "auto"
) -> Payload:
    """Encodes a tensor as it would be sent to a single rank.

    Rounding has no gradient worth the name. The collectives have that of the exact
    ones, straight through the codec; ``quantize`` and ``dequantize`` have none.

    Args:
      x: any shape; float32, bfloat16 or float16. Blocks run along the last axis.
      fmt: the wire format.
      backend: which implementation of the codec to use.

    Returns:
      A uint8 vector of ``rows * ceil(width / block_size) * fmt.block_bytes`` bytes: the
      codes of all blocks, then their bfloat16 scales. In block coordinates, a value is
      off by at most ``echo_jax.wire.contraction(fmt)`` times its block's peak.

    Raises:
      ValueError: if ``x`` is not floating-point, or the backend cannot run.

    Example:
        >>> payload = quantize(jnp.ones((4, 64)), WireFormat(bits=4))
        >>> payload.shape, payload.dtype
        ((136,), dtype('uint8'))
    """
    check_format(fmt)
    x = jnp.asarray(x)
    if x.dtype.name not in ("float32", "bfloat16", "float16"):
        raise ValueError(
            f"quantize needs float32, bfloat16 or float16, got {x.dtype}: cast x first."
        )
    if x.size == 0:
        return jnp.zeros((0,), jnp.uint8)
    rows = x.reshape(blocking.row_shape(x.shape))
    payloads, _ = get_codec(backend, fmt).send(rows, None, fmt=fmt, chunks=1)
    return payloads[0]


def dequantize(
    payload: Payload,
    shape: Shape,
    dtype=jnp.float32,
    fmt: WireFormat = WireFormat(),
    *,
    backend: Backend = "auto",
) -> AnyFloat:
    """Decodes a payload: the inverse of :func:`quantize` up to its rounding.

    Args:
      payload: from :func:`quantize`.
      shape: shape of the tensor.
      dtype: dtype of the result; float32 holds the decoded values exactly.
      fmt: the wire format that the payload was made with.
      backend: which implementation of the codec to use.

    Returns:
      The tensor.

    Raises:
      ValueError: if the payload has another length than shape and format imply, or
        ``dtype`` is not a float's.

    Example:
        >>> fmt = WireFormat(bits=4)
        >>> x_hat = dequantize(quantize(x, fmt), x.shape, x.dtype, fmt)
    """
    check_format(fmt)
    shape = tuple(shape)
    needed = blocking.num_blocks(shape, fmt.block_size) * fmt.block_bytes
    if payload.shape != (needed,) or payload.dtype != jnp.uint8:
        raise ValueError(
            f"dequantize: shape {shape} in {fmt} takes a payload of {needed} uint8 "
            f"values, got {payload.dtype}{list(payload.shape)}. Use the shape and the "
            "format that quantize was called with."
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"dequantize: dtype={dtype!r} would cut the values short: decode them as "
            "floats and round as you wish."
        )
    if math.prod(shape) == 0:
        return jnp.zeros(shape, dtype)
    rows = get_codec(backend, fmt).return_(
        payload[None, None], shape=blocking.row_shape(shape), dtype=dtype, fmt=fmt
    )
    return rows.reshape(shape)
