import jax.numpy as jnp
import numpy as np
import pytest

import echo_jax as echo
from echo_jax.layers import Attention, RMSNorm, SwiGLU, apply_rope
from tests import modules

WIDTH = 32
EXACT = echo.EchoConfig().exact()


def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def build_attention():
    return Attention(
        WIDTH, num_heads=8, num_kv_heads=4, head_dim=8, rngs=modules.rngs()
    )


def build_mlp():
    return SwiGLU(WIDTH, 24, rngs=modules.rngs())


@pytest.mark.parametrize("build", [build_attention, build_mlp])
def test_same_result_on_one_and_four_ranks(build):
    x = jnp.asarray(
        np.random.default_rng(0).standard_normal((2, 7, WIDTH)), jnp.float32
    )
    params = modules.init(build)
    run = lambda size: modules.simulated(  # noqa: E731
        lambda m, x: m(x, None, config=EXACT)[0], build, size
    )(params, x)[0]
    np.testing.assert_allclose(run(4), run(1), rtol=0, atol=1e-6)


def test_attention_is_causal():
    x = jnp.asarray(
        np.random.default_rng(0).standard_normal((1, 9, WIDTH)), jnp.float32
    )
    params = modules.init(build_attention)
    run = modules.simulated(
        lambda m, x: m(x, None, config=EXACT)[0], build_attention, 2
    )
    before, after = run(params, x)[0], run(params, x.at[0, 5:].add(1.0))[0]
    np.testing.assert_allclose(before[0, :5], after[0, :5], rtol=0, atol=1e-6)
    assert float(jnp.abs(before[0, 5:] - after[0, 5:]).max()) > 1e-3


def test_rope_depends_on_the_distance_alone():
    random = np.random.default_rng(0)
    query = jnp.asarray(random.standard_normal((1, 1, 1, 16)), jnp.float32)
    key = jnp.asarray(random.standard_normal((1, 1, 1, 16)), jnp.float32)

    def score(at_query, at_key):
        turned = apply_rope(query, jnp.array([at_query]), 100.0)
        return float(jnp.sum(turned * apply_rope(key, jnp.array([at_key]), 100.0)))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)


def test_rope_keeps_lengths():
    x = draw(2, 5, 3, 8)
    turned = apply_rope(x, jnp.arange(5), 10_000.0)
    np.testing.assert_allclose(
        jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5
    )


def test_rms_norm_against_float64():
    norm = RMSNorm(WIDTH, rngs=modules.rngs())
    x = np.random.default_rng(0).standard_normal((3, WIDTH)) * 1e3
    params = {"scale": jnp.linspace(0.5, 2.0, WIDTH)}
    got = modules.simulated(lambda m, x: m(x), lambda: norm, 2)(params, jnp.asarray(x))
    mean = np.mean(x**2, axis=-1, keepdims=True) + norm.epsilon
    wanted = x / np.sqrt(mean) * np.asarray(params["scale"], np.float64)
    np.testing.assert_allclose(got[0], wanted, rtol=1e-5)
