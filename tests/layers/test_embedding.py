import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from echo_jax.collectives import exact
from echo_jax.layers import (
    VocabParallelEmbed,
    VocabParallelReadout,
    vocab_parallel_cross_entropy,
)
from tests import modules as ranks
from tests.modules import AXIS

VOCAB, WIDTH = 50, 16


def build_embed():
    return VocabParallelEmbed(VOCAB, WIDTH, pad_to=8, rngs=ranks.rngs())


def build_readout():
    return VocabParallelReadout(WIDTH, VOCAB, pad_to=8, rngs=ranks.rngs())


@pytest.mark.parametrize("size", [1, 2, 8])
def test_sum_over_ranks_is_the_lookup(size):
    params = ranks.init(build_embed)
    tokens = jnp.arange(VOCAB)[:, None]
    lookup = ranks.simulated(
        lambda m, tokens: lax.psum(m(tokens), AXIS), build_embed, size
    )
    np.testing.assert_array_equal(
        lookup(params, tokens)[0][:, 0], params["embedding"][:VOCAB]
    )


def test_each_token_is_one_ranks():
    params = ranks.init(build_embed)
    parts = ranks.simulated(lambda m, t: m(t), build_embed, 8)(
        params, jnp.arange(VOCAB)
    )
    assert ((np.abs(parts).max(axis=-1) > 0).sum(axis=0) == 1).all()


@pytest.mark.parametrize("size", [1, 2, 8])
def test_cross_entropy_and_gradient_are_those_of_whole_logits(size):
    params = ranks.init(build_readout)
    random = np.random.default_rng(1)
    x = jnp.asarray(20 * random.standard_normal((4, 6, WIDTH)), jnp.float32)
    labels = jnp.asarray(random.integers(0, VOCAB, (4, 6)))

    def local(module, x):
        x = exact.pvary(x, AXIS)
        return jnp.mean(vocab_parallel_cross_entropy(module(x), labels, AXIS))

    def whole(x):
        logits = x @ params["kernel"][:, :VOCAB]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    run = ranks.simulated(
        lambda m, x: jax.value_and_grad(lambda x: local(m, x))(x), build_readout, size
    )
    losses, gradients = run(params, x)
    loss, gradient = jax.value_and_grad(whole)(x)
    np.testing.assert_allclose(losses, loss, rtol=1e-5)
    for one in gradients:
        np.testing.assert_allclose(one, gradient, rtol=0, atol=1e-6)


def test_padding_of_the_vocabulary_has_no_probability():
    params = ranks.init(build_readout)
    logits = ranks.simulated(lambda m, x: m(x), build_readout, 8)(
        params, jnp.ones((1, WIDTH))
    )
    row = logits[:, 0].reshape(-1)
    assert row.size == 56
    assert float(jax.nn.softmax(row)[VOCAB:].sum()) == 0.0


def test_logits_are_never_gathered():
    """Per token three numbers cross ranks, whatever the vocabulary."""
    mesh = ranks.make_mesh(tensor=8)
    labels = jnp.zeros((4, 6), jnp.int32)

    def loss(module, x):
        logits = module(exact.pvary(x, AXIS))
        return jnp.mean(vocab_parallel_cross_entropy(logits, labels, AXIS))

    run = ranks.on_devices(
        loss, build_readout, mesh, (ranks.REPLICATED,), ranks.REPLICATED
    )
    params = ranks.init(build_readout)
    text = run.lower(params, jnp.ones((4, 6, WIDTH))).compile().as_text()
    lines = [line for line in text.splitlines() if " all-reduce(" in line]
    assert len(lines) == 3 or (len(lines) == 2 and "max" in text)
    assert not any(op in text for op in (" all-gather(", " all-to-all("))
    assert all("f32[4,6]" in line for line in lines)
