"""Gradients of the four verbs, and of a small network made of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import echo_jax as echo
from tests import oracle
from tests.ranks import MODES, bits_of, draw, mesh, on_ranks

QUANTIZED = echo.EchoConfig(min_bytes=0, residual_dtype="float32")
EXACT = QUANTIZED.exact()
RANKS, LAYERS, TOKENS, WIDTH, HIDDEN = 4, 3, 6, 64, 16


def _same_bits(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(bits_of(a), bits_of(b))


@pytest.mark.parametrize("mode", MODES)
def test_gradient_of_pvary_is_echo_psum_and_of_psum_the_identity(mode):
    """Bit for bit, with the residual's cotangent as the residual of the sum."""

    def body(x, cotangent, owed):
        residual = echo.init_residual(cotangent, "tp", config=QUANTIZED)
        owed = jax.tree.map(lambda leaf: leaf + owed, residual)
        call = functools.partial(echo.echo_pvary, axis_name="tp", config=QUANTIZED)
        (y, passed), pull = jax.vjp(call, x, residual)
        from_pull = pull((cotangent, owed))
        directly = echo.echo_psum(cotangent, owed, "tp", config=QUANTIZED)

        call = functools.partial(echo.echo_psum, axis_name="tp", config=QUANTIZED)
        (z, _), pull = jax.vjp(call, cotangent, residual)
        identity = pull((z, owed))
        return y, passed, residual, from_pull, directly, (z, owed), identity

    x, cotangent = draw(0, 5, 70), draw(1, RANKS, 5, 70)
    owed = draw(2, RANKS, scale=0.01)
    y, passed, residual, from_pull, directly, given, identity = on_ranks(
        body, mode=mode, replicated=(0,)
    )(x, cotangent, owed)
    _same_bits(y, np.stack([x] * RANKS))
    _same_bits(passed, residual)
    _same_bits(from_pull, directly)
    _same_bits(identity, given)
    assert (np.asarray(from_pull[0]) == np.asarray(from_pull[0])[0]).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", [EXACT, QUANTIZED], ids=["exact", "quantized"])
def test_gradients_of_scatter_and_gather_are_those_of_their_twins(mode, config):
    """Exactly, quantized or not: the way back travels at full width."""
    variants = [(0, True), (2, True), (-1, True), (1, False)]

    def body(x, seed):
        out = []
        for dimension, tiled in variants:
            residual = echo.init_residual(
                x, "tp", config=config, scatter_dimension=dimension, tiled=tiled
            )

            def ours(x, residual=residual, dimension=dimension, tiled=tiled):
                return echo.echo_psum_scatter(
                    x,
                    residual,
                    "tp",
                    scatter_dimension=dimension,
                    tiled=tiled,
                    config=config,
                )[0]

            def twin(x, dimension=dimension % 3, tiled=tiled):
                return lax.psum_scatter(
                    x, "tp", scatter_dimension=dimension, tiled=tiled
                )

            def gather(x, dimension=dimension, tiled=tiled):
                residual = echo.init_residual(x, "tp", config=config)
                return echo.echo_all_gather(
                    x, residual, "tp", axis=dimension, tiled=tiled, config=config
                )[0]

            def gather_twin(x, dimension=dimension, tiled=tiled):
                axis = dimension % (3 if tiled else 4)
                return lax.all_gather(x, "tp", axis=axis, tiled=tiled)

            for verb, exact in ((ours, twin), (gather, gather_twin)):
                y, pull = jax.vjp(verb, x)
                z, pull_exact = jax.vjp(exact, x)
                cotangent = jnp.sin(seed + jnp.arange(y.size)).reshape(y.shape)
                # As a function of x, so that its type is that of the output.
                cotangent = cotangent + 0 * z
                out.append((pull(cotangent)[0], pull_exact(cotangent)[0], y, z))
        return out

    x = draw(0, RANKS, 4, RANKS, 8)
    results = on_ranks(body, mode=mode)(x, np.arange(RANKS, dtype=np.float32))
    for ours, twin, y, z in results:
        assert ours.shape == twin.shape == x.shape
        np.testing.assert_allclose(ours, twin, rtol=0, atol=RANKS * 2.0**-22)
        if config is EXACT:
            np.testing.assert_allclose(y, z, rtol=0, atol=RANKS * 2.0**-20)


def _layer(h, weights, residual, config):
    up, down = weights
    inner, residual = echo.echo_pvary(h, residual, "tp", config=config)
    y, residual = echo.echo_psum(
        jnp.tanh(inner @ up) @ down, residual, "tp", config=config
    )
    return h + y, residual


def _loss(weights, x, *, config, scan=False, remat=None):
    """A network of residual layers on one rank; the same value on all."""
    layer = functools.partial(_layer, config=config)
    if remat is not None:
        layer = jax.checkpoint(layer, policy=remat)
    residual = echo.init_residual(x, "tp", config=config)
    if scan:

        def step(carry, w):
            return layer(carry[0], w, carry[1]), None

        (h, residual), _ = lax.scan(step, (x, residual), weights)
    else:
        h = x
        for index in range(LAYERS):
            h, residual = layer(h, [w[index] for w in weights], residual)
    return 0.5 * jnp.mean(h * h)


def _dense_loss(weights, x):
    """The same network whole, no ranks."""
    up, down = weights  # (ranks, layers, ...)
    h = x
    for index in range(LAYERS):
        parts = [jnp.tanh(h @ up[r, index]) @ down[r, index] for r in range(RANKS)]
        h = h + sum(parts)
    return 0.5 * jnp.mean(h * h)


@functools.cache
def _network():
    up = draw(0, RANKS, LAYERS, WIDTH, HIDDEN, scale=WIDTH**-0.5)
    down = draw(1, RANKS, LAYERS, HIDDEN, WIDTH, scale=0.5 * HIDDEN**-0.5)
    x = draw(2, TOKENS, WIDTH)
    value, grads = jax.jit(jax.value_and_grad(_dense_loss, argnums=(0, 1)))(
        (up, down), x
    )
    return (up, down), x, value, grads


# Matrix products of up to 64 terms, a few layers deep, in float32: relative to the
# largest entry of a gradient.
TOLERANCE = LAYERS * WIDTH * 2.0**-23


def _close(ours, exact, tolerance=TOLERANCE):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


def _inside(mode, **options):
    """``(loss, (weight gradients, x gradient))`` taken on each rank."""
    grad = jax.value_and_grad(functools.partial(_loss, **options), argnums=(0, 1))
    return on_ranks(grad, mode=mode, replicated=(1,))


def _outside(**options):
    """The same, ``grad`` around a ``shard_map`` that tracks types."""

    def loss(weights, x):
        def local(weights, x):
            weights = jax.tree.map(lambda w: w[0], weights)
            return _loss(weights, x, **options)

        return jax.shard_map(
            local, mesh=mesh(tp=RANKS), in_specs=(P("tp"), P()), out_specs=P()
        )(weights, x)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_c18_exact_configs_give_the_exact_gradient_taken_inside(mode, scan):
    weights, x, value, grads = _network()
    ours, (by_weights, by_x) = _inside(mode, config=EXACT, scan=scan)(weights, x)
    _close(by_weights, grads[0])
    for copy in by_x:
        _close(copy, grads[1])
    np.testing.assert_allclose(ours, np.full(RANKS, value), rtol=TOLERANCE)


@pytest.mark.parametrize("scan", [False, True], ids=["loop", "scan"])
def test_c18_exact_configs_give_the_exact_gradient_taken_outside(scan):
    weights, x, value, grads = _network()
    ours, by = _outside(config=EXACT, scan=scan)(weights, x)
    _close(by, grads)
    np.testing.assert_allclose(ours, value, rtol=TOLERANCE)


def test_quantized_gradients_agree_however_they_are_taken():
    """Inside and outside, on simulated ranks and devices, tracked or not.

    The codec makes the same decisions except at rounding edges, so nearly all of the
    difference to the exact gradient is common.
    """
    weights, x, _, grads = _network()
    config = echo.EchoConfig(
        min_bytes=0, format=echo.WireFormat(bits=8), residual_dtype="float32"
    )
    results = [_inside(mode, config=config)(weights, x)[1] for mode in MODES]
    results = [(w, np.asarray(by_x)[0]) for w, by_x in results]
    results.append(_outside(config=config)(weights, x)[1])
    exact = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grads)])
    flat = [
        np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result)])
        for result in results
    ]
    error = np.linalg.norm(flat[0] - exact)
    assert 0 < error <= 0.02 * np.linalg.norm(exact)
    for other in flat[1:]:
        assert np.linalg.norm(other - flat[0]) <= 0.2 * error


def test_a_gradient_taken_outside_without_tracking_is_divided_by_the_ranks():
    """The documented limit of ``check_vma=False``: JAX's scaling, not ours."""
    x, c = draw(0, RANKS, 3, 64), draw(1, 3, 64)

    def loss(x, *, check_vma):
        def local(x):
            y, _ = echo.echo_psum(x[0], None, "tp", config=EXACT)
            return y

        total = jax.shard_map(
            local,
            mesh=mesh(tp=RANKS),
            in_specs=P("tp"),
            out_specs=P(),
            check_vma=check_vma,
        )(x)
        return (total * c).sum()

    tracked = jax.jit(jax.grad(functools.partial(loss, check_vma=True)))(x)
    untracked = jax.jit(jax.grad(functools.partial(loss, check_vma=False)))(x)
    np.testing.assert_array_equal(tracked, np.stack([c] * RANKS))
    np.testing.assert_array_equal(untracked, np.stack([c / RANKS] * RANKS))


@pytest.mark.parametrize("config", [EXACT, QUANTIZED], ids=["exact", "quantized"])
def test_c14_checkpoint_and_scan_change_nothing_but_rounding(config):
    policies = jax.checkpoint_policies
    saved = policies.save_only_these_names("echo_psum")
    weights, x, _, _ = _network()
    reference = _inside("vma", config=config)(weights, x)
    for options in (
        {"scan": True},
        {"remat": policies.nothing_saveable},
        {"remat": saved},
        {"scan": True, "remat": saved},
    ):
        other = _inside("vma", config=config, **options)(weights, x)
        _close(other, reference)


@pytest.mark.parametrize(
    "verb", [echo.echo_pvary, echo.echo_psum_scatter, echo.echo_all_gather]
)
def test_a_gradient_outside_of_simulated_ranks_is_refused_with_the_way_out(verb):
    """JAX runs the gradient's rule where the axis of the vmap is not bound."""

    def total(x):
        one = lambda x: verb(x, None, "tp", config=QUANTIZED)[0]  # noqa: E731
        return jax.vmap(one, axis_name="tp")(x).sum()

    with pytest.raises(ValueError, match="take gradients inside the vmap"):
        jax.grad(total)(draw(0, RANKS, 4, 64))


@pytest.mark.parametrize("mode", MODES)
def test_backward_errors_telescope_and_the_cotangent_is_what_is_owed(mode):
    """One residual, two channels: forward unused here, backward summed exactly."""
    calls = 30
    config = QUANTIZED

    def body(x, cotangents):
        residual = echo.init_residual(cotangents[0], "tp", config=config)

        def loss(x, residual):
            def step(residual, cotangent):
                y, residual = echo.echo_pvary(x, residual, "tp", config=config)
                return residual, (y * cotangent).sum()

            residual, terms = lax.scan(step, residual, cotangents)
            return terms.sum()

        return jax.grad(loss, argnums=(0, 1))(x, residual)

    cotangents = draw(0, RANKS, calls, 5, 128)
    x = draw(1, 5, 128)
    grad, owed = on_ranks(body, mode=mode, replicated=(0,))(x, cotangents)
    exact = cotangents.astype(np.float64).sum(axis=(0, 1))
    twin = oracle.Format(4, 64, True)
    blocks = np.asarray(owed.send, np.float64).sum(axis=0) + np.asarray(owed.reduce)
    owed = oracle.from_blocks(oracle.unrotate(blocks, twin), x.shape)
    assert (np.asarray(grad) == np.asarray(grad)[0]).all()
    distance = np.linalg.norm(grad[0] + owed - exact)
    assert distance <= 2e-5 * np.linalg.norm(exact)
    # Far from exact without what is owed, so that the test means something.
    assert np.linalg.norm(grad[0] - exact) >= 100 * distance


def test_short_dtypes_have_gradients_of_their_dtype():
    for dtype in ("bfloat16", "float16"):
        x = draw(0, 3, 4, 64, dtype=dtype)

        def loss(x):
            residual = echo.init_residual(x, "tp", config=QUANTIZED)
            y, residual = echo.echo_psum(x, residual, "tp", config=QUANTIZED)
            y, residual = echo.echo_pvary(y, residual, "tp", config=QUANTIZED)
            return (y * y).sum().astype(jnp.float32)

        grad = on_ranks(jax.grad(loss))(x)
        assert grad.dtype == x.dtype
        assert np.isfinite(np.asarray(grad, np.float32)).all()


@pytest.mark.parametrize("mode", ["vmap", "vma"])
@pytest.mark.parametrize("bits", [None, 8])
def test_second_derivatives_are_those_of_the_exact_sum(bits, mode):
    """The rules call each other, so that no derivative of a rounding is taken."""
    fmt = echo.WireFormat(bits=bits or 4)
    config = echo.EchoConfig(format=fmt, min_bytes=0, residual_dtype="float32")
    config = config if bits else config.exact()
    ranks, weights = 4, draw(0, 4, 64, 64, scale=0.1)
    h = draw(1, 8, 64)

    def norm_of_gradient(w, h):
        def loss(h):
            residual = echo.init_residual(h, "tp", config=config)
            x, residual = echo.echo_pvary(h, residual, "tp", config=config)
            y, _ = echo.echo_psum(jnp.sin(x @ w), residual, "tp", config=config)
            return jnp.sum(jnp.sin(h + y))

        return jnp.sum(jax.grad(loss)(h) ** 2)

    def whole(h):
        total = sum(jnp.sin(h @ weights[rank]) for rank in range(ranks))
        return jnp.sum(jnp.sin(h + total))

    found = on_ranks(jax.grad(norm_of_gradient, argnums=1), mode=mode, replicated=(1,))
    wanted = jax.grad(lambda h: jnp.sum(jax.grad(whole)(h) ** 2))(h)
    error = jnp.linalg.norm(found(weights, h)[0] - wanted) / jnp.linalg.norm(wanted)
    # At 8 bits a call leaves about one percent, and six calls take part.
    assert error < (0.06 if bits else 1e-5)


def test_flush_pays_whatever_the_configuration_says():
    config = echo.EchoConfig(min_bytes=0)
    off = echo.EchoConfig(min_bytes=0, feedback=False)

    def owed(x):
        residual = echo.init_residual(x, "tp", config=config)
        _, residual = echo.echo_psum(x, residual, "tp", config=config)
        _, residual = echo.flush(x, residual, "tp", config=off)
        return residual.send, residual.reduce

    send, reduce = on_ranks(owed)(draw(0, 4, 8, 64))
    assert not send.any()
    assert not reduce.any()
