"""What computes the attention of a layer: XLA's operations or cuDNN's kernels."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from echo_jax import platform
from echo_jax.batching import fold_vmap
from echo_jax.typing import AnyFloat

# What may be asked for, and what ``jax.nn.dot_product_attention`` is then told.
AttentionChoice = Literal["auto", "xla", "cudnn"]
Implementation = Literal["xla", "cudnn"]

_CUDNN_DTYPES = ("bfloat16", "float16")
# What every GPU can do that runs cuDNN's kernels. Hopper takes longer heads, but these
# have not been tried.
_LONGEST_HEAD = 128
_LEAST_CAPABILITY = (8, 0)


def check_choice(choice: AttentionChoice, dtype, head_dim: int) -> None:
    """Refuses a choice that is wrong on every device.

    Raises:
      ValueError: for an unknown choice, or if cuDNN is asked for with a dtype or a head
        that it is not used for.
    """
    if choice not in get_args(AttentionChoice):
        raise ValueError(
            f"attention={choice!r} must be one of {get_args(AttentionChoice)}."
        )
    if choice == "cudnn" and not _fits(dtype, head_dim):
        raise ValueError(
            f"attention='cudnn' takes dtypes {_CUDNN_DTYPES} and a head_dim that is a "
            f"multiple of 8, at most {_LONGEST_HEAD}; got {jnp.dtype(dtype).name} and "
            f"{head_dim}. Take 'auto' or 'xla'."
        )


def choose_implementation(
    choice: AttentionChoice, dtype, head_dim: int
) -> Implementation:
    """cuDNN's flash attention where ``auto`` may take it, else XLA's operations.

    ``auto`` takes cuDNN if values have 16 bits, ``head_dim`` is a multiple of 8 and at
    most 128, and the program is traced for NVIDIA GPUs of compute capability 8.0 and
    more (Ampere) that are here: a program that is compiled ahead of time for others
    has XLA's operations.

    Raises:
      ValueError: as :func:`check_choice`, and if cuDNN is asked for where it cannot
        run.
    """
    check_choice(choice, dtype, head_dim)
    if choice == "xla" or not _fits(dtype, head_dim):
        return "xla"
    if (platform.cuda_capability() or (0, 0)) >= _LEAST_CAPABILITY:
        return "cudnn"
    if choice == "cudnn":
        raise ValueError(
            "attention='cudnn' needs NVIDIA GPUs of compute capability 8.0 (Ampere) "
            f"and more; JAX's default devices are {jax.local_devices()[0].device_kind},"
            " and the mesh may have others. Take 'auto', which falls back to 'xla'."
        )
    return "xla"


def attend(
    query: AnyFloat, key: AnyFloat, value: AnyFloat, *, choice: AttentionChoice
) -> AnyFloat:
    """Causal softmax attention of ``(batch, length, heads, head_dim)`` queries.

    Args:
      query: of this rank's heads.
      key: ``(batch, length, kv_heads, head_dim)``; ``kv_heads`` divides ``heads``.
      value: as ``key``.
      choice: what computes it.

    Returns:
      The mixed values, shaped and typed as ``query``.

    Raises:
      ValueError: as :func:`choose_implementation`.
    """
    implementation = choose_implementation(choice, query.dtype, query.shape[-1])
    length = query.shape[1]
    if implementation == "cudnn" and length % 2:
        # JAX refuses cuDNN's gradients of odd lengths. Nothing attends to what follows.
        query, key, value = map(_with_one_more_token, (query, key, value))
    mixed = jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=implementation
    )
    return mixed[:, :length]


def attend_masked(
    query: AnyFloat,
    key: AnyFloat,
    value: AnyFloat,
    mask: Bool[Array, "batch length slots"],
    *,
    choice: AttentionChoice,
) -> AnyFloat:
    """As :func:`attend`, to the slots that a mask allows; no gradients.

    A single token is left to XLA: its scores are few. cuDNN holds the mask in 16 bits,
    for all heads together.

    Args:
      query: ``(batch, length, heads, head_dim)``, of this rank's heads.
      key: ``(batch, slots, kv_heads, head_dim)``.
      value: as ``key``.
      mask: the slots that each query attends to.
      choice: what computes it.

    Returns:
      The mixed values, shaped and typed as ``query``; something finite for a query that
      may attend to nothing.

    Raises:
      ValueError: as :func:`choose_implementation`.
    """
    implementation = choose_implementation(choice, query.dtype, query.shape[-1])
    if query.shape[1] == 1:
        implementation = "xla"

    # JAX's own rule for cuDNN under vmap takes a mask of one head for one of all heads.
    @fold_vmap
    def masked(query, key, value, mask):
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask[:, None], implementation=implementation
        )

    return masked(query, key, value, mask)


def _with_one_more_token(x: AnyFloat) -> AnyFloat:
    return jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0)))


def _fits(dtype, head_dim: int) -> bool:
    return (
        jnp.dtype(dtype).name in _CUDNN_DTYPES
        and head_dim % 8 == 0
        and head_dim <= _LONGEST_HEAD
    )
