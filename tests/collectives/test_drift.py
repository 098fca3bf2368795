"""Replicated weights stay the same on all ranks while they are trained."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import echo_jax as echo
from echo_jax.collectives import exact
from tests.ranks import bits_of, draw, on_ranks

RANKS, LAYERS, TOKENS, WIDTH, HIDDEN = 8, 2, 32, 64, 8
STEPS = 50
CONFIG = echo.EchoConfig(min_bytes=0)


def _forward(params, x, *, tracked):
    """Embedding and norm scales on all ranks; of other weights each has a part."""
    shared, own = params
    h = x @ shared["embedding"]
    residual = echo.init_residual(h, "tp", config=CONFIG)
    for layer in range(LAYERS):
        scale = shared["scale"][layer]
        inner, residual = echo.echo_pvary(h, residual, "tp", config=CONFIG)
        inner = inner * lax.rsqrt(jnp.mean(inner**2, -1, keepdims=True) + 1e-6)
        # Its gradient is a partial sum: JAX adds those up where it tracks types.
        inner = inner * (scale if tracked else exact.pvary(scale, "tp"))
        y = jnp.tanh(inner @ own["up"][layer]) @ own["down"][layer]
        y, residual = echo.echo_psum(y, residual, "tp", config=CONFIG)
        h = h + y
    return h


def _train(mode):
    optimizer = optax.adamw(1e-2)

    def body(own, shared, x, target):
        def loss(params):
            h = _forward(params, x, tracked=mode == "vma")
            return jnp.mean((h - target) ** 2)

        def step(carry, _):
            params, state = carry
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        params = (shared, own)
        state = optimizer.init(params)
        (params, _), losses = lax.scan(step, (params, state), None, length=STEPS)
        last_grads = jax.grad(loss)(params)
        h = _forward(params, x, tracked=mode == "vma")
        return losses, params[0], last_grads[0], h

    own = {
        "up": draw(0, RANKS, LAYERS, WIDTH, HIDDEN, scale=WIDTH**-0.5),
        "down": draw(1, RANKS, LAYERS, HIDDEN, WIDTH, scale=HIDDEN**-0.5 / 8),
    }
    shared = {
        "embedding": draw(2, WIDTH, WIDTH, scale=WIDTH**-0.5),
        "scale": np.ones((LAYERS, WIDTH), np.float32),
    }
    x, target = draw(3, TOKENS, WIDTH), draw(4, TOKENS, WIDTH)
    return on_ranks(body, mode=mode, replicated=(1, 2, 3))(own, shared, x, target)


@pytest.mark.parametrize("mode", ["vma", "no_vma"])
def test_c12_replicated_values_are_bit_identical_after_50_steps(mode):
    """Weights, gradients, outputs and losses; and the training trains."""
    losses, weights, grads, outputs = _train(mode)
    for leaf in jax.tree.leaves((losses, weights, grads, outputs)):
        assert np.isfinite(leaf).all()
        for copy in leaf[1:]:
            np.testing.assert_array_equal(bits_of(copy), bits_of(leaf[0]))
    losses = np.asarray(losses)[0]
    assert losses[-1] < 0.5 * losses[0]
    assert (np.asarray(weights["scale"]) != 1.0).mean() > 0.9
