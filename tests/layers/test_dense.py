import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import echo_jax as echo
from echo_jax.collectives import exact
from echo_jax.layers import (
    ColumnParallelDense,
    RowParallelDense,
    merge_module,
    split_module,
)
from echo_jax.layers.dense import apply_side_by_side
from tests import modules
from tests.modules import AXIS
from tests.ranks import mesh

IN, HIDDEN, OUT = 48, 64, 80
EXACT = echo.EchoConfig().exact()
FOUR_BITS = echo.EchoConfig(min_bytes=0)


class TwoLayers(nnx.Module):
    def __init__(self, use_bias: bool, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.3)
        kinds = {"use_bias": use_bias, "kernel_init": normal, "rngs": rngs}
        self.up = ColumnParallelDense(IN, HIDDEN, **kinds)
        self.down = RowParallelDense(HIDDEN, OUT, **kinds)

    def __call__(self, x, config):
        residual = None
        x, residual = echo.echo_pvary(x, residual, AXIS, config=config)
        return self.down(jnp.tanh(self.up(x)), residual, config=config)[0]


def build(use_bias: bool = True):
    return TwoLayers(use_bias, modules.rngs())


def reference(params, x):
    hidden = np.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
    return hidden @ params["down"]["kernel"] + params["down"]["bias"]


@pytest.fixture
def x():
    random = np.random.default_rng(0)
    return jnp.asarray(random.standard_normal((3, 5, IN)), jnp.float32)


@pytest.fixture
def params():
    params = modules.init(build)
    for layer in params.values():  # biases are zero at first, which would hide them
        bias = layer["bias"]
        layer["bias"] = jnp.linspace(-1.0, 1.0, bias.size, dtype=bias.dtype)
    return params


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_exact_pair_is_the_whole_product(x, params, size):
    forward = modules.simulated(lambda m, x: m(x, EXACT), build, size)
    wide = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    # float32 dot products of at most 64 terms of magnitude about 1.
    tolerance = HIDDEN * np.finfo(np.float32).eps
    outputs = forward(params, x)
    np.testing.assert_allclose(
        outputs[0],
        reference(wide, np.asarray(x, np.float64)),
        rtol=0,
        atol=8 * tolerance,
    )
    assert all((out == outputs[0]).all() for out in outputs)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_are_those_of_the_whole_product(x, params, check_vma):
    graphdef, _, specs = split_module(jax.eval_shape(build))

    def local(params, x):
        return jnp.sum(merge_module(graphdef, params)(x, EXACT) ** 2)

    sharded = jax.jit(
        jax.shard_map(
            jax.grad(local, argnums=(0, 1)),
            mesh=mesh(tensor=8),
            in_specs=(specs, modules.REPLICATED),
            out_specs=(specs, modules.REPLICATED),
            check_vma=check_vma,
        )
    )

    def whole(params, x):
        hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"])
        y = hidden @ params["down"]["kernel"] + params["down"]["bias"]
        return jnp.sum(y**2)

    got = sharded(params, x)
    wanted = jax.jit(jax.grad(whole, argnums=(0, 1)))(params, x)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        scale = float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * scale)


def test_four_bit_error_is_within_the_bound(x, params):
    size, config = 4, dataclasses.replace(FOUR_BITS, feedback=False)
    partial = modules.simulated(
        lambda m, x: jnp.tanh(m.up(x)) @ m.down.kernel[...], build, size
    )(params, x)
    peak = float(jnp.max(jnp.abs(partial)))
    bound = echo.error_bound(
        config.format,
        ranks=size,
        peak=peak * echo.wire.bounds.rotation_gain(config.format),
        feedback=False,
        calls=1,
    )
    exact = modules.simulated(lambda m, x: m(x, EXACT), build, size)(params, x)
    coarse = modules.simulated(lambda m, x: m(x, config), build, size)(params, x)
    error = float(jnp.max(jnp.abs(coarse - exact)))
    assert 0.0 < error <= bound.output


class Pair(nnx.Module):
    """Two layers of one input, of different widths, one of them with a bias."""

    def __init__(self):
        kinds = {"rngs": modules.rngs()}
        self.one = ColumnParallelDense(IN, HIDDEN, **kinds)
        self.two = ColumnParallelDense(IN, 2 * HIDDEN, use_bias=True, **kinds)
        self.two.bias[...] = jnp.linspace(-1.0, 1.0, 2 * HIDDEN)

    def together(self, x):
        return apply_side_by_side(x, self.one, self.two)

    def apart(self, x):
        return self.one(x), self.two(x)


def loss_of_pair(apply):
    def loss(pair, x):
        one, two = apply(pair, exact.pvary(x, AXIS))
        return exact.psum(jnp.sum(jnp.sin(one)) + jnp.sum(two**2), AXIS)

    return loss


@pytest.mark.parametrize("tokens", [3, 2 * IN])
@pytest.mark.parametrize("check_vma", [True, False])
def test_side_by_side_is_layer_by_layer(tokens, check_vma):
    x = jax.random.normal(jax.random.key(0), (tokens, IN))
    graphdef, params, specs = split_module(Pair())

    def gradient(apply):
        def local(params, x):
            loss = loss_of_pair(apply)
            return jax.value_and_grad(
                lambda params, x: loss(merge_module(graphdef, params), x), (0, 1)
            )(params, x)

        return jax.jit(
            jax.shard_map(
                local,
                mesh=mesh(tensor=4),
                in_specs=(specs, modules.REPLICATED),
                out_specs=(modules.REPLICATED, (specs, modules.REPLICATED)),
                check_vma=check_vma,
            )
        )(params, x)

    found, wanted = gradient(Pair.together), gradient(Pair.apart)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # Sums of as many terms as there are features, or tokens, in another order.
        scale = float(jnp.max(jnp.abs(other)))
        tolerance = 2 * max(tokens, 3 * HIDDEN) * np.finfo(np.float32).eps
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("tokens", "products"),
    [(2 * IN, 3), (3, 6)],  # forward, gradient of x, gradient of kernels
)
def test_side_by_side_is_one_product_for_many_tokens(tokens, products):
    """And copies no kernel for a few."""
    pair, x = Pair(), jnp.ones((tokens, IN))
    loss = jax.vmap(
        jax.grad(loss_of_pair(Pair.together), (0, 1)),
        in_axes=None,
        axis_name=AXIS,
        axis_size=1,
    )
    operations = str(jax.make_jaxpr(loss)(pair, x))
    # The backward pass recomputes the copy, and not the product.
    assert operations.count("dot_general") == products
    assert ("concatenate" in operations) == (tokens > IN)
