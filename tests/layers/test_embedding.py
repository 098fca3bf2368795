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
from tests import hlo, modules
from tests.modules import AXIS
from tests.ranks import mesh

VOCAB, WIDTH = 50, 16


def build_embed():
    return VocabParallelEmbed(VOCAB, WIDTH, pad_to=8, rngs=modules.rngs())


def build_readout():
    return VocabParallelReadout(WIDTH, VOCAB, pad_to=8, rngs=modules.rngs())


@pytest.mark.parametrize("size", [1, 2, 8])
def test_sum_over_ranks_is_the_lookup(size):
    params = modules.init(build_embed)
    tokens = jnp.arange(VOCAB)[:, None]
    lookup = modules.simulated(
        lambda m, tokens: lax.psum(m(tokens), AXIS), build_embed, size
    )
    np.testing.assert_array_equal(
        lookup(params, tokens)[0][:, 0], params["embedding"][:VOCAB]
    )


@pytest.mark.parametrize(("dtype", "size"), [("uint8", 256), ("uint16", 65536)])
def test_token_ids_may_fill_their_dtype(dtype, size):
    """Files of tokens hold no more bits than the vocabulary needs."""
    build = lambda: VocabParallelEmbed(size, 4, rngs=modules.rngs())  # noqa: E731
    params, tokens = modules.init(build), jnp.asarray([0, 3, size - 1], dtype)
    lookup = modules.simulated(lambda m, t: lax.psum(m(t), AXIS), build, 4)
    rows = params["embedding"][tokens.astype(int)]
    np.testing.assert_array_equal(lookup(params, tokens)[0], rows)
    logits = jax.random.normal(jax.random.key(0), (3, 4, size // 4))
    losses = jax.vmap(
        lambda logits: vocab_parallel_cross_entropy(logits, tokens, AXIS),
        in_axes=1,
        axis_name=AXIS,
    )(logits)
    wanted = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits.reshape(3, size), tokens.astype(int)
    )
    np.testing.assert_allclose(losses[0], wanted, rtol=1e-6)


def test_each_token_is_one_ranks():
    params = modules.init(build_embed)
    parts = modules.simulated(lambda m, t: m(t), build_embed, 8)(
        params, jnp.arange(VOCAB)
    )
    assert ((np.abs(parts).max(axis=-1) > 0).sum(axis=0) == 1).all()


@pytest.mark.parametrize("size", [1, 2, 8])
def test_cross_entropy_and_gradient_are_those_of_whole_logits(size):
    params = modules.init(build_readout)
    random = np.random.default_rng(1)
    x = jnp.asarray(20 * random.standard_normal((4, 6, WIDTH)), jnp.float32)
    labels = jnp.asarray(random.integers(0, VOCAB, (4, 6)))

    def local(module, x):
        x = exact.pvary(x, AXIS)
        return jnp.mean(vocab_parallel_cross_entropy(module(x), labels, AXIS))

    def whole(x):
        logits = x @ params["kernel"][:, :VOCAB]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    run = modules.simulated(
        lambda m, x: jax.value_and_grad(lambda x: local(m, x))(x), build_readout, size
    )
    losses, gradients = run(params, x)
    loss, gradient = jax.value_and_grad(whole)(x)
    np.testing.assert_allclose(losses, loss, rtol=1e-5)
    for one in gradients:
        np.testing.assert_allclose(one, gradient, rtol=0, atol=1e-6)


def test_padding_of_the_vocabulary_has_no_probability():
    params = modules.init(build_readout)
    logits = modules.simulated(lambda m, x: m(x), build_readout, 8)(
        params, jnp.ones((1, WIDTH))
    )
    row = logits[:, 0].reshape(-1)
    assert row.size == 56
    assert float(jax.nn.softmax(row)[VOCAB:].sum()) == 0.0


@pytest.mark.parametrize("pad_to", [8, 10])
def test_only_a_padded_vocabulary_is_masked(pad_to):
    """A mask is one more pass over all logits."""
    readout = VocabParallelReadout(WIDTH, VOCAB, pad_to=pad_to, rngs=modules.rngs())
    on_ranks = jax.vmap(readout, axis_name=AXIS, axis_size=1, in_axes=None)
    operations = str(jax.make_jaxpr(on_ranks)(jnp.ones((3, WIDTH))))
    assert ("select_n" in operations) == (VOCAB % pad_to > 0)


def test_logits_are_never_gathered():
    """Per token three numbers cross ranks, whatever the vocabulary."""
    labels = jnp.zeros((4, 6), jnp.int32)

    def loss(module, x):
        logits = module(exact.pvary(x, AXIS))
        return jnp.mean(vocab_parallel_cross_entropy(logits, labels, AXIS))

    run = modules.on_devices(
        loss, build_readout, mesh(tensor=8), (modules.REPLICATED,), modules.REPLICATED
    )
    params = modules.init(build_readout)
    compiled = run.lower(params, jnp.ones((4, 6, WIDTH))).compile()
    found = hlo.collectives(compiled)
    assert found
    for collective in found:
        assert collective.op == "all-reduce"
        assert collective.buffer_bytes <= 2 * 4 * labels.size
