"""Values of the four verbs against exact sums, on every way to have ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import echo_jax as echo
from tests import oracle
from tests.ranks import MODES, bits_of, draw, on_ranks

ALL_BITS = (2, 3, 4, 6, 8)


def _config(bits=4, block_size=64, rotate=True, **fields):
    fmt = echo.WireFormat(bits=bits, block_size=block_size, rotate=rotate)
    return echo.EchoConfig(format=fmt, **{"min_bytes": 0, **fields})


def _twin(config) -> oracle.Format:
    fmt = config.format
    return oracle.Format(fmt.bits, fmt.block_size, fmt.rotate)


def _psum(config, axis_name="tp"):
    def body(x):
        residual = echo.init_residual(x, axis_name, config=config)
        return echo.echo_psum(x, residual, axis_name, config=config)

    return body


def _check_first_call(y, x, config):
    """One call from a zero residual: each rank's copy within the bound."""
    fmt, ranks = _twin(config), x.shape[0]
    exact = x.astype(np.float64).sum(axis=0)
    bound = echo.error_bound(
        config.format,
        ranks=ranks,
        peak=max(oracle.block_peak(part, fmt) for part in x),
        sum_peak=oracle.block_peak(exact, fmt),
        calls=1,
        feedback=False,
    )
    limit = bound.stream + oracle.float32_slack(x, fmt)
    if y.dtype != np.float32:
        # The output is rounded to its dtype, which adds up over a rotated block.
        eps = float(jnp.finfo(y.dtype).eps) / 2
        spread = fmt.block * oracle.gains(fmt)[0] if fmt.rotate else 1.0
        limit += eps * spread * (np.abs(exact).max(initial=0.0) + bound.output)
    assert oracle.block_error(y[0], exact, fmt) <= limit
    for copy in y[1:]:
        np.testing.assert_array_equal(bits_of(copy), bits_of(y[0]))


@pytest.mark.parametrize(
    ("mode", "rotate"),
    [("vmap", True), ("vmap", False), ("vma", True), ("no_vma", True)],
)
def test_c05_each_call_has_the_width_it_asks_for(mode, rotate):
    """All widths in one program; the error falls with the width."""
    configs = [_config(bits, rotate=rotate) for bits in ALL_BITS]
    x = draw(0, 8, 5, 100)
    outputs = on_ranks(lambda x: [_psum(c)(x)[0] for c in configs], mode=mode)(x)
    errors = []
    for config, y in zip(configs, outputs, strict=True):
        y = np.asarray(y)
        _check_first_call(y, x, config)
        errors.append(np.abs(y[0] - x.sum(axis=0)).mean())
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 8])
def test_c10_any_axis_size_pads_and_never_falls_back(ranks):
    """Also on devices; two calls, so that residuals of padded chunks are used."""
    config = _config(residual_dtype="float32")
    x = draw(ranks, ranks, 7, 70)

    def body(x):
        y, residual = _psum(config)(x)
        again, residual = echo.echo_psum(x, residual, "tp", config=config)
        rest, _ = echo.flush(jnp.zeros_like(x), residual, "tp", config=config)
        return y, again, rest

    simulated, on_devices = (on_ranks(body, mode=m)(x) for m in ("vmap", "vma"))
    for mine, theirs in zip(simulated, on_devices, strict=True):
        # The rotations may sum in another order, so only rank copies are bit-equal.
        bound = echo.error_bound(
            config.format, ranks=ranks, peak=8 * float(np.abs(x).max())
        )
        assert np.abs(np.asarray(mine) - np.asarray(theirs)).max() <= bound.output
    for y, again, rest in (simulated, on_devices):
        y, again, rest = (np.asarray(part) for part in (y, again, rest))
        _check_first_call(y, x, config)
        assert (again == again[0]).all()
        total = y.astype(np.float64) + again + rest
        exact = 2 * x.astype(np.float64).sum(axis=0)
        assert np.linalg.norm(total[0] - exact) <= 2e-6 * np.linalg.norm(exact)
    assert echo.explain((7, 70), "float32", ranks, config).path == "echo"


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_c06_two_calls_are_bit_for_bit_those_of_the_oracle(bits):
    """Sums in float32 in rank order, residuals as stored; all ranks the same bytes."""
    for residual_dtype in ("float32", "bfloat16"):
        config = _config(bits, 32, rotate=False, residual_dtype=residual_dtype)
        x = draw(bits, 2, 5, 3, 75)

        def body(first, second, config=config):
            y, residual = _psum(config)(first)
            z, residual = echo.echo_psum(second, residual, "tp", config=config)
            return y, z, residual.send, residual.reduce

        y, z, send, reduce = on_ranks(body)(x[0], x[1])
        dtype = np.dtype(jnp.dtype(residual_dtype))
        twin = oracle.TwoShot(_twin(config), 5, (3, 75), dtype)
        for out, inputs in ((y, x[0]), (z, x[1])):
            expected = twin(inputs)
            for copy in out:
                np.testing.assert_array_equal(copy, expected)
        np.testing.assert_array_equal(send, twin.send)
        np.testing.assert_array_equal(reduce, twin.reduce)


SHAPES = [(), (1,), (3,), (0,), (4, 0, 3), (65,), (1, 1, 1, 130), (2, 3, 5, 7), (2880,)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_c09_any_shape_keeps_its_shape_and_dtype(dtype):
    config = _config(residual_dtype="float32")
    inputs = [draw(i, 3, *shape, dtype=dtype) for i, shape in enumerate(SHAPES)]

    def body(*xs):
        out = []
        for x in xs:
            y, residual = _psum(config)(x)
            z, residual = echo.flush(x, residual, "tp", config=config)
            out.append((y, z))
        return out

    for x, (y, z) in zip(inputs, on_ranks(body)(*inputs), strict=True):
        y, z = np.asarray(y), np.asarray(z)
        assert y.shape == z.shape == x.shape
        assert y.dtype == z.dtype == x.dtype
        _check_first_call(y, x, config)
        # Both outputs and the flushed sum are rounded to the dtype, and so is each
        # rank's share of the flush.
        eps = float(jnp.finfo(x.dtype).eps)
        magnitude = np.abs(x.astype(np.float64)).sum(axis=0).max(initial=0.0)
        exact = 2 * x.astype(np.float64).sum(axis=0)
        distance = np.abs(y[0].astype(np.float64) + z[0] - exact).max(initial=0.0)
        assert distance <= 8 * eps * magnitude + 8 * 2.0**-23 * 64 * magnitude


@settings(max_examples=8)
@given(
    shape=st.lists(st.integers(0, 20), max_size=4).map(tuple),
    ranks=st.integers(1, 6),
    bits=st.sampled_from(ALL_BITS),
    rotate=st.booleans(),
    num_chunks=st.integers(1, 4),
)
def test_c19_any_call_is_within_its_bound(shape, ranks, bits, rotate, num_chunks):
    config = _config(bits, 16, rotate, num_chunks=num_chunks)
    x = draw(len(shape), ranks, *shape)
    y, residual = on_ranks(_psum(config))(x)
    assert y.shape == x.shape
    assert residual.send.dtype == jnp.bfloat16
    _check_first_call(np.asarray(y), x, config)


def test_num_chunks_changes_no_bit():
    """Of outputs and residuals, of two calls, with and without feedback.

    Seven blocks a rank, in one, two, three and as many pieces as there are.
    """
    x = draw(0, 2, 3, 4, 300)

    def body(config):
        def run(first, second):
            y, residual = _psum(config)(first)
            z, residual = echo.echo_psum(second, residual, "tp", config=config)
            free, _ = echo.echo_psum(first, None, "tp", config=config)
            return y, z, free, residual.send, residual.reduce

        return on_ranks(run)

    whole = body(_config())(x[0], x[1])
    for num_chunks in (2, 3, 1000):
        pieces = body(_config(num_chunks=num_chunks))(x[0], x[1])
        for one, other in zip(whole, pieces, strict=True):
            np.testing.assert_array_equal(bits_of(one), bits_of(other))


@pytest.mark.parametrize("mode", MODES)
def test_scatter_and_gather_are_their_twins_in_every_variant(mode):
    """Each dimension, tiled or not; block sizes far from the dimensions."""
    config = _config(8, 16, residual_dtype="float32")
    ranks = 4
    x = draw(0, ranks, 4, 8, 12)
    scatters = [(0, True), (1, True), (2, True), (-1, True), (-2, True), (0, False)]
    gathers = [(0, True), (1, True), (-1, True), (0, False), (3, False), (-1, False)]

    def body(x):
        out = []
        for dimension, tiled in scatters:
            residual = echo.init_residual(
                x, "tp", config=config, scatter_dimension=dimension, tiled=tiled
            )
            ours, residual = echo.echo_psum_scatter(
                x,
                residual,
                "tp",
                scatter_dimension=dimension,
                tiled=tiled,
                config=config,
            )
            again, _ = echo.echo_psum_scatter(
                x,
                residual,
                "tp",
                scatter_dimension=dimension,
                tiled=tiled,
                config=config,
            )
            twin = lax.psum_scatter(
                x, "tp", scatter_dimension=dimension % 3, tiled=tiled
            )
            out.append((ours, again, twin))
        for axis, tiled in gathers:
            residual = echo.init_residual(x, "tp", config=config)
            ours, residual = echo.echo_all_gather(
                x, residual, "tp", axis=axis, tiled=tiled, config=config
            )
            again, _ = echo.echo_all_gather(
                x, residual, "tp", axis=axis, tiled=tiled, config=config
            )
            ndim = 3 if tiled else 4
            twin = lax.all_gather(x, "tp", axis=axis % ndim, tiled=tiled)
            out.append((ours, again, twin))
        return out

    # Block coordinates of a block of 16 hold at most 4 times the peak, and an error
    # there comes out 4 times as large at most.
    peak = 4 * float(np.abs(x).max())
    for index, (ours, again, twin) in enumerate(on_ranks(body, mode=mode)(x)):
        terms = ranks if index < len(scatters) else 1
        bound = echo.error_bound(config.format, ranks=1, peak=peak)
        limit = 4 * terms * bound.send_residual + 1e-5
        assert ours.shape == twin.shape
        assert ours.dtype == twin.dtype
        assert np.abs(ours - twin).max() <= limit
        # Feedback: after two calls what is owed is one rounding still.
        assert np.abs(ours + again - 2 * twin).max() <= limit
        if index >= len(scatters):
            assert (np.asarray(ours) == np.asarray(ours)[0]).all()


@pytest.mark.parametrize(
    ("shape", "dimension", "tiled"),
    [
        ((4,), 0, False),
        ((4,), 0, True),
        ((8,), 0, True),
        ((3, 4), -1, False),
        ((3, 8), 1, True),
        ((4, 0), 0, False),
    ],
)
def test_an_exact_scatter_pays_every_part_what_is_owed_to_it(shape, dimension, tiled):
    """Also where a part is a single number, or nothing."""
    config = _config(residual_dtype="float32")
    options = {"scatter_dimension": dimension, "tiled": tiled}

    def body(first, second):
        owed = echo.init_residual(first, "tp", config=config, **options)
        y, owed = echo.echo_psum_scatter(first, owed, "tp", config=config, **options)
        exact = config.exact()
        z, owed = echo.echo_psum_scatter(second, owed, "tp", config=exact, **options)
        total, place = first + second, dimension % first.ndim
        twin = lax.psum_scatter(total, "tp", scatter_dimension=place, tiled=tiled)
        return y, y + z, twin, owed.send

    x = draw(0, 2, 4, *shape)
    y, ours, twin, left = on_ranks(body)(x[0], x[1])
    assert ours.shape == twin.shape
    np.testing.assert_allclose(ours, twin, rtol=0, atol=4 * 64 * 2.0**-22)
    assert not np.asarray(left).any()
    if y.size:  # so that there was something to pay
        assert np.abs(y - x[0].sum(axis=0).reshape(y.shape)).max(initial=0) > 1e-3


@pytest.mark.parametrize("mode", MODES)
def test_inputs_that_are_alike_on_all_ranks_are_inputs_like_any_other(mode):
    """JAX's batching treats them apart."""
    config = _config(residual_dtype="float32")
    x = draw(0, 8, 64)

    def body(x):
        y, residual = _psum(config)(x)
        s, _ = echo.echo_psum_scatter(x, None, "tp", config=config)
        g, _ = echo.echo_all_gather(x, None, "tp", config=config)
        return y, s, g, residual

    def alike(rank, x):
        del rank
        return body(x)

    ranks = np.arange(4.0)
    ours = on_ranks(alike, mode=mode, replicated=(1,))(ranks, x)
    apart = on_ranks(body, mode=mode)(np.stack([x] * 4))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(a, b)


def test_short_dtypes_scatter_and_gather():
    config = _config(8, 16)
    for dtype in ("bfloat16", "float16"):
        x = draw(1, 3, 6, 20, dtype=dtype)

        def body(x):
            s, _ = echo.echo_psum_scatter(x, None, "tp", config=config)
            g, _ = echo.echo_all_gather(x, None, "tp", axis=1, config=config)
            return s, g, lax.all_gather(x, "tp", axis=1, tiled=True)

        s, g, exact = on_ranks(body)(x)
        assert s.dtype == g.dtype == x.dtype
        assert s.shape == (3, 2, 20)
        total = x.astype(np.float64).sum(axis=0).reshape(3, 2, 20)
        limit = 16 * np.abs(x.astype(np.float64)).max() * (1 / 255 + 2.0**-8) * 3
        assert np.abs(np.float64(s) - total).max() <= limit
        assert np.abs(np.float64(g) - np.float64(exact)).max() <= limit


@pytest.mark.parametrize("bits", ALL_BITS)
def test_c01_range_is_never_narrowed(bits):
    """One value of 1e30 on one rank, and sums beyond float16."""
    for rotate in (False, True):
        config = _config(bits, 16, rotate)
        x = draw(0, 4, 2, 32, scale=3e4)
        x[1, 0, 3] = 1e30
        run = on_ranks(_psum(config))
        _check_first_call(np.asarray(run(x)[0]), x, config)
        # A quiet block beside the loud one keeps its own scale.
        quiet = x.copy()
        quiet[1, 0, 3] = 0.0
        np.testing.assert_array_equal(run(x)[0][0, :, 16:], run(quiet)[0][0, :, 16:])
        assert np.abs(run(quiet)[0]).max() > 65504


@pytest.mark.parametrize("rotate", [False, True])
def test_c02_scaling_inputs_by_powers_of_two_scales_outputs_and_residuals(rotate):
    config = _config(4, 32, rotate)
    x = draw(0, 4, 3, 64)

    def body(x):
        y, residual = _psum(config)(x)
        z, residual = echo.echo_psum(x, residual, "tp", config=config)
        return y, z, residual

    run = on_ranks(body)
    once = jax.tree.map(np.asarray, run(x))
    for exponent in (-96, -40, -1, 1, 50, 96):
        factor = np.float32(2.0**exponent)
        scaled = run(x * factor)
        for one, other in zip(
            jax.tree.leaves(once), jax.tree.leaves(scaled), strict=True
        ):
            np.testing.assert_array_equal(
                np.asarray(other, np.float32), np.asarray(one, np.float32) * factor
            )


def test_c03_zero_inputs_give_zeros_a_zero_residual_and_finite_gradients():
    config = _config(2, 16)
    x = draw(0, 3, 4, 48)
    x[:, :, 16:32] = 0.0

    def body(x):
        def loss(x):
            y, residual = _psum(config)(x)
            return (y * y).sum(), (y, residual)

        grad, (y, residual) = jax.grad(loss, has_aux=True)(x)
        return y, residual.send, residual.reduce, grad

    y, send, reduce, grad = on_ranks(body)(x)
    assert not np.asarray(y)[:, :, 16:32].any()
    assert not bits_of(np.abs(y[:, :, 16:32])).any()
    # Blocks 1, 4, 7, 10 of each rank's 12 are the zero ones.
    assert not np.asarray(send).reshape(3, 12, 16)[:, 1::3].any()
    assert not np.asarray(reduce).reshape(12, 16)[1::3].any()
    assert np.isfinite(grad).all()
    zero = on_ranks(body)(np.zeros_like(x))
    assert not any(np.asarray(leaf).any() for leaf in zero)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rotate", [False, True])
def test_c04_nan_and_inf_reach_every_rank_and_never_the_residual(bad, rotate):
    config = _config(4, 16, rotate)
    x = draw(0, 3, 2, 48)
    spoiled = x.copy()
    spoiled[1, 1, 20] = bad

    def body(first, second):
        y, residual = _psum(config)(first)
        z, again = echo.echo_psum(second, residual, "tp", config=config)
        return y, residual, z, again

    run = on_ranks(body)
    y, residual, z, again = run(spoiled, x)
    expected = np.zeros(x.shape, bool)
    expected[:, 1, 16:32] = True
    np.testing.assert_array_equal(np.isnan(y), expected)
    assert not np.isinf(np.asarray(y)).any()
    for leaf in jax.tree.leaves((residual, z, again)):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()
    # Block 4 of the 6 is spoiled, the first in the chunk of the last rank: neither its
    # sender nor its owner owes anything there.
    assert not np.asarray(residual.send).reshape(3, 6, 16)[1, 4].any()
    assert not np.asarray(residual.reduce).reshape(6, 16)[4].any()
    assert np.asarray(residual.send).reshape(3, 6, 16)[0, 4].any()
    # The next call is clean, and untouched in the other blocks.
    fmt = _twin(config)
    peak = max(oracle.block_peak(part, fmt) for part in x)
    bound = echo.error_bound(config.format, ranks=3, peak=peak)
    limit = 2 * bound.stream + oracle.float32_slack(x, fmt)
    assert oracle.block_error(z[0], x.sum(axis=0, dtype=np.float64), fmt) <= limit
    _, _, second, _ = run(x, x)
    np.testing.assert_array_equal(z[:, 0], second[:, 0])


def test_c04_a_nan_in_the_exact_path_shows_and_the_residual_is_zero_after():
    config = _config(4, 16)
    x = draw(0, 3, 2, 48)
    spoiled = x.copy()
    spoiled[1, 1, 20] = np.nan

    def body(first, second):
        _, residual = _psum(config)(first)
        y, residual = echo.flush(second, residual, "tp", config=config)
        return y, residual

    y, residual = on_ranks(body)(x, spoiled)
    assert np.isnan(np.asarray(y)[:, 1, 20]).all()
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(residual))
