"""Which kernel computes the attention of a layer."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from echo_jax import platform
from echo_jax.typing import AnyFloat

# What may be asked for, and what ``jax.nn.dot_product_attention`` is then told.
AttentionKernel = Literal["auto", "xla", "cudnn"]
Implementation = Literal["xla", "cudnn"]

_CUDNN_DTYPES = ("bfloat16", "float16")
# What every GPU does that runs cuDNN's kernels; Hopper would take longer heads.
_LONGEST_HEAD = 128
_LEAST_CAPABILITY = (8, 0)


def check_attention_kernel(kernel: AttentionKernel, dtype, head_dim: int) -> None:
    """Refuses what can be computed on no device.

    Raises:
      ValueError: for an unknown kernel, or if cuDNN is asked for with a dtype or a head
        that it does not take.
    """
    if kernel not in get_args(AttentionKernel):
        raise ValueError(
            f"attention={kernel!r} must be one of {get_args(AttentionKernel)}."
        )
    if kernel == "cudnn" and not _fits(dtype, head_dim):
        raise ValueError(
            f"attention='cudnn' takes dtypes {_CUDNN_DTYPES} and a head_dim that is a "
            f"multiple of 8, at most {_LONGEST_HEAD}; got {jnp.dtype(dtype).name} and "
            f"{head_dim}. Take 'auto' or 'xla'."
        )


def choose_implementation(
    kernel: AttentionKernel, dtype, head_dim: int
) -> Implementation:
    """cuDNN's flash attention where ``auto`` may take it, else XLA's operations.

    ``auto`` takes cuDNN if values have 16 bits, ``head_dim`` is a multiple of 8 and at
    most 128, and JAX's default devices are NVIDIA GPUs of compute capability 8.0 and
    more (Ampere).

    Raises:
      ValueError: as :func:`check_attention_kernel`, and if cuDNN is asked for where
        JAX's default devices cannot run it.
    """
    check_attention_kernel(kernel, dtype, head_dim)
    if kernel == "xla" or not _fits(dtype, head_dim):
        return "xla"
    if (platform.cuda_capability() or (0, 0)) >= _LEAST_CAPABILITY:
        return "cudnn"
    if kernel == "cudnn":
        raise ValueError(
            "attention='cudnn' needs NVIDIA GPUs of compute capability 8.0 (Ampere) "
            f"and more; JAX's default devices are {jax.local_devices()[0].device_kind}."
            " Take 'auto', which falls back to 'xla'."
        )
    return "xla"


def attend(
    query: AnyFloat,
    key: AnyFloat,
    value: AnyFloat,
    *,
    kernel: AttentionKernel,
    mask: Bool[Array, "batch 1 length slots"] | None = None,
) -> AnyFloat:
    """Softmax attention of ``(batch, length, heads, head_dim)`` queries.

    Args:
      query: of this rank's heads.
      key: ``(batch, slots, kv_heads, head_dim)``; ``kv_heads`` divides ``heads``.
      value: as ``key``.
      kernel: what computes it. A single token after a cache is left to XLA.
      mask: the slots that each query attends to; None for itself and those before.

    Returns:
      The mixed values, shaped and typed as ``query``.

    Raises:
      ValueError: as :func:`choose_implementation`.
    """
    implementation = choose_implementation(kernel, query.dtype, query.shape[-1])
    length = query.shape[1]
    if mask is not None and length == 1:
        implementation = (
            "xla"  # one token after the cache: nothing to keep out of memory
        )
    if implementation == "cudnn" and mask is None and length % 2:
        # cuDNN's gradients need an even length; no token attends to one after it.
        query, key, value = map(_with_one_more_token, (query, key, value))
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=mask is None,
        implementation=implementation,
    )
    return mixed[:, :length]


def _with_one_more_token(x: AnyFloat) -> AnyFloat:
    return jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0)))


def _fits(dtype, head_dim: int) -> bool:
    return (
        jnp.dtype(dtype).name in _CUDNN_DTYPES
        and head_dim % 8 == 0
        and head_dim <= _LONGEST_HEAD
    )
