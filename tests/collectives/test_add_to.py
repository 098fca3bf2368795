"""``echo_psum(add_to=...)``: the stream after a sum, in the pass that decodes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import echo_jax as echo
from tests.ranks import MODES, bits_of, draw, mesh, on_ranks

RANKS, SHAPE = 4, (5, 70)  # ragged blocks, and padding in the last chunk
CONFIG = echo.EchoConfig(min_bytes=0, residual_dtype="float32")
CONFIGS = {
    "plain": echo.EchoConfig(min_bytes=0, format=echo.WireFormat(rotate=False)),
    "int4": echo.EchoConfig(min_bytes=0, residual_dtype="int4"),
    "pieces": echo.EchoConfig(min_bytes=0, residual_dtype="int8", num_chunks=2),
    "no feedback": echo.EchoConfig(min_bytes=0, feedback=False),
    "exact": echo.EchoConfig(min_bytes=1 << 20),
}


def _same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(bits_of(a), bits_of(b))


def _both_ways(config, x, h):
    """The call onto ``h``, and the same sum in float32 added to ``h`` afterwards."""
    residual = echo.init_residual(x, "tp", config=config)
    residual = residual if config.feedback else None
    onto = echo.echo_psum(x, residual, "tp", add_to=h, config=config)
    x = x.astype("float32")
    y, residual = echo.echo_psum(x, residual, "tp", config=config)
    return onto, ((h.astype("float32") + y).astype(h.dtype), residual)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("int4", "vmap"), ("pieces", "vma"), ("no feedback", "no_vma"), ("exact", "vma")],
)
def test_in_float32_it_is_the_sum_taken_afterwards(name, mode):
    """Bit for bit, on every rank, the residual too."""
    body = functools.partial(_both_ways, CONFIGS[name])
    x, h = draw(0, RANKS, *SHAPE), draw(1, *SHAPE, scale=100.0)
    got, want = on_ranks(body, mode=mode, replicated=(1,))(x, h)
    _same_bits(got, want)
    _same_bits(got[0], np.stack([np.asarray(got[0])[0]] * RANKS))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_it_is_rounded_once(dtype):
    """The sum of the same payloads, decoded and added in float32, then cast."""
    body = functools.partial(_both_ways, CONFIGS["plain"])
    x, h = draw(0, RANKS, *SHAPE, dtype=dtype), draw(1, *SHAPE, dtype=dtype, scale=30.0)
    _same_bits(*on_ranks(body, replicated=(1,))(x, h))


@pytest.mark.parametrize(
    ("name", "mode"), [*(("plain", mode) for mode in MODES), ("exact", "vma")]
)
def test_the_gradient_of_what_is_added_to_is_the_identity(name, mode):
    config = CONFIGS[name]

    def body(x, h, owed):
        residual = echo.init_residual(x, "tp", config=config)
        residual_bar = jax.tree.map(lambda leaf: leaf + owed, residual)

        def call(x, residual, h):
            return echo.echo_psum(x, residual, "tp", add_to=h, config=config)

        (y, _), pull = jax.vjp(call, x, residual, h)
        return (y, residual_bar, y), pull((y, residual_bar))

    x, h, owed = draw(0, RANKS, *SHAPE), draw(1, *SHAPE), draw(2, RANKS, scale=0.01)
    run = on_ranks(body, mode=mode, replicated=(1,))
    want, got = run(x, h, owed.astype("bfloat16"))
    _same_bits(got, want)


def _network_gradients(fused):
    """Of three layers by ``scan``, recomputed going back, forward and backward in few
    bits, differentiated outside the ``shard_map``."""

    def layer(carry, weights):
        h, residual = carry
        x, residual = echo.echo_pvary(h, residual, "tp", config=CONFIG)
        x = jnp.tanh(x @ weights[0]) @ weights[1]
        call = functools.partial(echo.echo_psum, axis_name="tp", config=CONFIG)
        if fused:
            return call(x, residual, add_to=h), None
        y, residual = call(x, residual)
        return (h + y, residual), None

    def local(weights, h):
        residual = echo.init_residual(h, "tp", config=CONFIG)
        (h, _), _ = jax.lax.scan(jax.checkpoint(layer), (h, residual), weights)
        return jnp.sum(jnp.sin(h))

    specs = (P(None, None, "tp"), P(None, "tp"))
    loss = jax.shard_map(
        local, mesh=mesh(tp=RANKS), in_specs=(specs, P()), out_specs=P()
    )
    weights = draw(1, 3, 64, 16, scale=0.1), draw(2, 3, 16, 64, scale=0.2)
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(weights, draw(3, 6, 64))


def test_a_network_has_the_same_gradients():
    _same_bits(_network_gradients(True), _network_gradients(False))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda h: h[:1],
            r"x's shape and dtype, float32\[5, 70\], got float32\[1, 70\]",
        ),
        (lambda h: h.astype(jnp.bfloat16), "got bfloat16"),
        (lambda h: jax.lax.pcast(h, "tp", to="varying"), r"varies along \['tp'\]"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, message):
    def body(x, h):
        return echo.echo_psum(x, None, "tp", add_to=wrong(h), config=CONFIG)[0]

    with pytest.raises(ValueError, match=message):
        on_ranks(body, mode="vma", replicated=(1,))(
            draw(0, RANKS, *SHAPE), draw(1, *SHAPE)
        )


@pytest.mark.parametrize("wrong", ["(y, residual)", "residual"])
@pytest.mark.usefixtures("as_shipped")
def test_what_is_no_array_is_refused_by_name(wrong):
    """The call before returns a pair, which is easily handed on whole."""

    def body(x, h):
        pair = echo.echo_psum(x, echo.init_residual(x, "tp"), "tp", add_to=h)
        add_to = pair if wrong == "(y, residual)" else pair[1]
        return echo.echo_psum(x, None, "tp", add_to=add_to)[0]

    with pytest.raises(TypeError, match=r"add_to must be one array, got .*hand on y"):
        on_ranks(body, replicated=(1,))(draw(0, RANKS, *SHAPE), draw(1, *SHAPE))
