"""What docs/theory.md says, one statement a test. Constants: test_typical.py."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import echo_jax as echo
from echo_jax.wire import typical_bound
from echo_jax.wire.bounds import contraction, gaussian_contraction, rotation_gain
from tests import oracle
from tests.ranks import draw, on_ranks

FEEDBACK = echo.EchoConfig(min_bytes=0, residual_dtype="float32")
PLAIN = echo.EchoConfig(min_bytes=0, feedback=False)


def outputs(xs, config):
    """Outputs of calls on ``(calls, ranks, ...)``, and the last residual."""

    def body(xs):
        residual = echo.init_residual(xs[0], "tp", config=config)

        def step(residual, x):
            y, residual = echo.echo_psum(x, residual, "tp", config=config)
            return residual, y

        residual, ys = jax.lax.scan(step, residual, xs)
        return ys, residual

    ys, residual = on_ranks(body)(np.moveaxis(xs, 0, 1))
    return np.asarray(ys[0], np.float64), residual


def rms(x):
    return float(np.sqrt(np.mean(np.square(x))))


def round_trip(x, **fields):
    fmt = echo.WireFormat(**fields)
    back = echo.dequantize(echo.quantize(jnp.asarray(x), fmt), x.shape, x.dtype, fmt)
    return np.asarray(back, np.float64) - x


# One rounding


def test_two_bits_contract_the_maximum_norm_but_not_the_euclidean_one():
    fmt = echo.WireFormat(bits=2, rotate=False)
    x = np.full((1, 64), 0.01, np.float32)
    x[0, 0] = 1.0
    error = round_trip(x, bits=2, rotate=False)
    assert np.abs(error).max() <= contraction(fmt) < 1
    assert np.linalg.norm(error) > 2 * np.linalg.norm(x)


def test_a_spike_costs_less_when_rotated():
    x = draw(0, 500, 64)
    x[:, 17] = 1000.0
    others = np.arange(64) != 17
    plain = rms(round_trip(x, rotate=False)[:, others])
    rotated = rms(round_trip(x, rotate=True)[:, others])
    # Not rotated: every other value becomes half a scale, M/15.
    assert plain == pytest.approx(1000 / 15, rel=0.02)
    # Rotated: what is left is below half a scale of M/sqrt(B).
    assert rotated <= 1000 / 15 / np.sqrt(64)
    assert plain >= np.sqrt(64) * rotated


def test_a_constant_block_grows_when_rotated():
    for block_size in (16, 64, 128):
        fmt = echo.WireFormat(block_size=block_size)
        twin = oracle.Format(4, block_size, True)
        block = np.ones((1, block_size), np.float32)
        assert np.abs(oracle.rotate(block, twin)).max() == rotation_gain(fmt)
    assert rotation_gain(echo.WireFormat()) == np.sqrt(64)


# Two roundings that telescope


def test_telescoping_identity_of_two_stages_call_by_call():
    ranks, calls = 3, 12
    twin = oracle.Format(3, 16, False)
    xs = draw(1, calls, ranks, 40, 16)
    send, reduce = np.zeros((ranks, 40, 16)), np.zeros((40, 16))
    total, exact = 0.0, 0.0
    for x in xs:
        sent = (x + send).astype(np.float32)
        codes, scales, _ = oracle.quantize_blocks(sent, twin)
        decoded = oracle.decode(codes, scales, twin).astype(np.float64)
        send = x + send - decoded
        s = decoded.sum(axis=0) + reduce
        codes, scales, _ = oracle.quantize_blocks(s.astype(np.float32), twin)
        y = oracle.decode(codes, scales, twin).astype(np.float64)
        reduce = s - y
        total, exact = total + y, exact + x.astype(np.float64).sum(axis=0)
        np.testing.assert_allclose(total, exact - send.sum(0) - reduce, atol=1e-12)


# Forward


@pytest.mark.parametrize("bits", [2, 4])
def test_forward_error_does_not_depend_on_depth_and_grows_with_ranks(bits):
    fmt = echo.WireFormat(bits=bits)
    config = echo.EchoConfig(format=fmt, min_bytes=0, residual_dtype="float32")
    errors = {}
    for ranks in (2, 8, 32):
        xs = draw(ranks, 40, ranks, 8, 256)
        ys, _ = outputs(xs, config)
        missing = (ys - xs.astype(np.float64).sum(axis=1)).cumsum(axis=0)
        late, early = rms(missing[-1]), rms(missing[1])
        assert 0.85 <= late / early <= 1.15
        errors[ranks] = late / np.sqrt(ranks)
        twin = oracle.Format(bits, 64, True)
        bound = echo.error_bound(
            fmt,
            ranks=ranks,
            peak=max(oracle.block_peak(x, twin) for x in xs.reshape(-1, 8, 256)),
        )
        for error in missing:
            assert oracle.block_error(error, 0 * error, twin) <= bound.stream
    # Seen: the square root of the ranks. The worst case: the ranks.
    assert max(errors.values()) <= 1.1 * min(errors.values())
    worst = [echo.error_bound(fmt, ranks=n).stream for n in (8, 32)]
    assert worst[1] / worst[0] == pytest.approx(4.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
def test_bounds_cover_what_storing_residuals_loses(dtype):
    config = echo.EchoConfig(min_bytes=0, residual_dtype=dtype)
    ranks, calls = 4, 150
    xs = draw(12, calls, ranks, 8, 256)
    ys, _ = outputs(xs, config)
    exact = xs.astype(np.float64).sum(axis=1)
    missing = (ys - exact).cumsum(axis=0)
    twin = oracle.Format(4, 64, True)
    peak = max(oracle.block_peak(x, twin) for x in xs.reshape(-1, 8, 256))
    sum_peak = max(oracle.block_peak(x.astype(np.float32), twin) for x in exact)
    for call in (1, 10, calls):
        kinds = {
            "ranks": ranks,
            "peak": peak,
            "sum_peak": sum_peak,
            "calls": call,
            "residual_dtype": dtype,
        }
        error = oracle.block_error(missing[call - 1], 0 * missing[0], twin)
        assert error <= typical_bound(config.format, values=2048, **kinds).stream
        assert error <= echo.error_bound(config.format, **kinds).stream


# Backward


def test_gradient_of_the_stream_has_the_error_of_one_call():
    """Partial gradients enter along depth; the stream's gradient adds them up."""
    ranks, depth = 4, 60
    parts = draw(2, ranks, depth, 8, 256)

    def gradient(config):
        def body(parts):
            def loss(h):
                residual = echo.init_residual(h, "tp", config=config)

                def layer(carry, part):
                    h, residual, total = carry
                    x, residual = echo.echo_pvary(h, residual, "tp", config=config)
                    return (h, residual, total + jnp.sum(part * x)), None

                carry = (h, residual, jnp.zeros(()))
                return jax.lax.scan(layer, carry, parts)[0][2]

            return jax.grad(loss)(jnp.zeros(parts.shape[1:]))

        return np.asarray(on_ranks(body)(parts)[0], np.float64)

    exact = parts.astype(np.float64).sum(axis=0)
    error = gradient(FEEDBACK) - exact.sum(axis=0)
    twin = oracle.Format(4, 64, True)
    peaks = [oracle.block_peak(p, twin) for p in parts.reshape(-1, 8, 256)]
    bound = echo.error_bound(FEEDBACK.format, ranks=ranks, peak=max(peaks))
    assert oracle.block_error(error, 0 * error, twin) <= bound.stream
    single = rms(exact[0])
    assert rms(error) <= 0.16 * single
    assert rms(gradient(PLAIN) - exact.sum(axis=0)) >= 5 * rms(error)


# What is not promised


def test_transient_is_shaped_like_a_first_order_difference():
    """Little at low frequencies along depth, twice as much in all."""
    calls, ranks = 256, 4
    xs = draw(3, calls, ranks, 2, 256)
    exact = xs.astype(np.float64).sum(axis=1)
    shaped, white = (outputs(xs, config)[0] - exact for config in (FEEDBACK, PLAIN))
    frequencies = 2 * np.pi * np.fft.rfftfreq(calls)

    def spectrum(errors):
        return np.mean(np.abs(np.fft.rfft(errors, axis=0)) ** 2, axis=(1, 2)) / calls

    expected = 4 * np.sin(frequencies / 2) ** 2
    owed = np.mean(np.square(np.cumsum(shaped, axis=0)))
    bands = np.array_split(np.arange(4, frequencies.size), 8)
    for band in bands:
        measured = spectrum(shaped)[band].mean() / owed
        assert measured == pytest.approx(expected[band].mean(), rel=0.15)
    flat = spectrum(white)
    assert flat[bands[0]].mean() == pytest.approx(flat[bands[-1]].mean(), rel=0.15)
    power = np.mean(np.square(shaped)) / np.mean(np.square(white))
    assert power == pytest.approx(2.0, rel=0.1)


def test_transient_is_within_twice_the_bound():
    ranks = 4
    xs = draw(4, 30, ranks, 4, 256)
    ys, _ = outputs(xs, FEEDBACK)
    twin = oracle.Format(4, 64, True)
    peak = max(oracle.block_peak(x, twin) for x in xs.reshape(-1, 4, 256))
    bound = echo.error_bound(FEEDBACK.format, ranks=ranks, peak=peak)
    errors = ys - xs.astype(np.float64).sum(axis=1)
    assert max(oracle.block_error(e, 0 * e, twin) for e in errors) <= 2 * bound.stream


def test_an_expanding_network_leaves_the_bound_behind():
    """The inputs move with the stream: the two networks part exponentially."""
    ranks, depth, gain = 2, 40, 0.2
    start = draw(5, 4, 256)

    def run(config):
        def body(h):
            residual = echo.init_residual(h, "tp", config=config)

            def layer(carry, _):
                h, residual = carry
                # Each rank adds its share of an odd function that grows small streams.
                part = gain * jnp.sin(h) / ranks
                y, residual = echo.echo_psum(part, residual, "tp", config=config)
                return (h + y, residual), y

            (h, _), ys = jax.lax.scan(layer, (h, residual), length=depth)
            return h, ys

        h, ys = on_ranks(body)(np.repeat(start[None], ranks, 0))
        return np.asarray(h[0], np.float64), np.asarray(ys[0], np.float64)

    exact, _ = run(FEEDBACK.exact())
    ours, ys = run(FEEDBACK)
    twin = oracle.Format(4, 64, True)
    peak = max(oracle.block_peak((y / ranks).astype(np.float32), twin) for y in ys)
    bound = echo.error_bound(FEEDBACK.format, ranks=ranks, peak=1.2 * peak)
    assert oracle.block_error(ours, exact, twin) > bound.stream


def test_norm_after_the_sum_lets_errors_grow():
    calls, ranks = 200, 4
    xs = draw(6, calls, ranks, 8, 256)
    exact = xs.astype(np.float64).sum(axis=1)
    ys, _ = outputs(xs, FEEDBACK)
    maps = np.exp(0.5 * np.random.default_rng(0).standard_normal((calls, 1, 256)))

    def growth(outputs, exact):
        missing = (outputs - exact).cumsum(axis=0)
        return rms(missing[-1]) / rms(missing[1])

    assert growth(ys, exact) <= 1.15
    assert growth(maps * ys, maps * exact) >= 4
    # The same with a norm that follows the data, a little each call.
    norm = lambda y: y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True))  # noqa: E731
    assert growth(norm(ys), norm(exact)) >= 2


# Outliers and shifts


def test_what_a_spike_leaves_shrinks_by_c_a_call():
    rng = np.random.default_rng(10)
    for bits in (2, 4):
        twin = oracle.Format(bits, 64, False)
        c = contraction(echo.WireFormat(bits=bits))
        owed = np.zeros((100, 64), np.float32)
        x = rng.uniform(-1, 1, (20, 100, 64)).astype(np.float32)
        usual = c / (1 - c)  # of values up to 1
        x[0, :, 17] = 1e4
        left = []
        for call in x:
            owed = oracle.quantize_blocks(call + owed, twin)[2]
            left.append(np.abs(owed).max())
        assert left[0] == pytest.approx(c * 1e4, rel=0.01)
        for before, after in itertools.pairwise(left):
            assert after - usual <= c * max(before - usual, 0) + 1e-4
        assert left[-1] <= usual


def test_equal_magnitudes_are_represented_nearly_exactly():
    x = 1e4 * np.sign(draw(11, 100, 64)).astype(np.float32)
    for bits in (2, 4, 8):
        error = round_trip(x, bits=bits, rotate=False)
        # Up to the rounding of the scale to 8 significant bits.
        assert np.abs(error).max() <= 2.0**-8 * 1e4


# The two ends


def test_exact_last_call_pays_what_is_owed():
    xs = draw(7, 10, 4, 8, 256)

    def body(xs):
        residual = echo.init_residual(xs[0], "tp", config=FEEDBACK)
        total = jnp.zeros_like(xs[0])
        plan = echo.DepthPlan.uniform(FEEDBACK, exact_final=True, num_calls=10)
        for call in range(10):
            y, residual = echo.echo_psum(xs[call], residual, "tp", config=plan[call])
            total = total + y
        return total

    total = np.asarray(on_ranks(body)(np.moveaxis(xs, 0, 1))[0], np.float64)
    exact = xs.astype(np.float64).sum(axis=(0, 1))
    assert rms(total - exact) <= 1e-5 * rms(exact)


def test_error_over_the_stream_falls_like_the_square_root_of_depth():
    xs = draw(8, 64, 4, 16, 256)
    exact = xs.astype(np.float64).sum(axis=1).cumsum(axis=0)
    ys, _ = outputs(xs, FEEDBACK)
    ratios = [
        rms((ys.cumsum(axis=0) - exact)[n - 1]) / rms(exact[n - 1])
        for n in (1, 4, 16, 64)
    ]
    for shallow, deep in itertools.pairwise(ratios):
        assert shallow / deep == pytest.approx(2.0, rel=0.15)


# The vocabulary's sum


def test_nearly_equal_rows_are_rounded_alike():
    """The mean error over tokens shrinks with their number, unless tokens are alike."""
    ranks, tokens = 4, 256
    rng = np.random.default_rng(9)
    different = rng.standard_normal((ranks, tokens, 256)).astype(np.float32)
    common = rng.standard_normal((ranks, 1, 256)) + 0.02 * different
    common = common.astype(np.float32)

    def bias(x, bits):
        config = echo.EchoConfig(format=echo.WireFormat(bits=bits), min_bytes=0)
        ys, _ = outputs(x[None], config)
        return rms((ys[0] - x.astype(np.float64).sum(axis=0)).mean(axis=0))

    one_rounding = gaussian_contraction(echo.WireFormat()) * np.sqrt(2 * ranks)
    assert bias(different, 4) <= 1.3 * one_rounding / np.sqrt(tokens)
    assert bias(common, 4) >= 5 * bias(different, 4)
    assert bias(common, 4) >= 15 * bias(common, 8)
