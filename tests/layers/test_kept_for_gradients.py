"""What the forward pass keeps for gradients, array by array."""

import functools

import jax
import jax.numpy as jnp
import pytest

from echo_jax.layers import RMSNorm, SwiGLU, vocab_parallel_cross_entropy
from tests import modules

WIDTH, TOKENS, HIDDEN, VOCAB = 64, 128, 96, 256


def kept(function, *args) -> list[tuple[int, str]]:
    """Size and dtype of what the gradients of one simulated rank keep."""

    def on_rank(*args):
        # The pullback is a pytree: its leaves are what it keeps.
        return jax.tree.leaves(jax.vjp(function, *args)[1])

    stacked = jax.tree.map(lambda a: a[None], args)
    leaves = jax.eval_shape(jax.vmap(on_rank, axis_name="tensor"), *stacked)
    return [(leaf.size, str(leaf.dtype)) for leaf in leaves]


def large(found, size: int) -> list[str]:
    return [dtype for n, dtype in found if n >= size]


def test_a_norm_keeps_its_input():
    norm = RMSNorm(WIDTH, dtype=jnp.bfloat16, rngs=modules.rngs())
    found = kept(norm, jnp.ones((TOKENS, WIDTH), jnp.bfloat16))
    assert large(found, TOKENS * WIDTH) == ["bfloat16"]


def test_gated_features_keep_both_factors():
    block = SwiGLU(WIDTH, HIDDEN, dtype=jnp.bfloat16, rngs=modules.rngs())
    found = kept(block.partial, jnp.ones((TOKENS, WIDTH), jnp.bfloat16))
    assert large(found, TOKENS * HIDDEN) == 2 * ["bfloat16"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_cross_entropy_keeps_the_logits_as_they_came(dtype):
    labels = jnp.zeros(TOKENS, jnp.int32)
    loss = functools.partial(vocab_parallel_cross_entropy, labels=labels)
    found = kept(loss, jnp.ones((TOKENS, VOCAB), dtype))
    assert large(found, TOKENS * VOCAB) == [dtype]
