import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_jax import WireFormat, dequantize, error_bound, quantize
from echo_jax.wire import bounds, quantizer
from tests import oracle
from tests.ranks import draw

BITS = (2, 3, 4, 6, 8)
BLOCK = 16

# Every float32 whose block has a scale that is neither zero nor overflowing.
MAGNITUDES = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@jax.jit
def _errors(values):
    """The rounding error of blocks over their peak, for every width."""
    peak = jnp.abs(values).max(-1)
    out = []
    for bits in BITS:
        fmt = WireFormat(bits=bits, block_size=BLOCK, rotate=False)
        codes, scales = quantizer.encode(values, fmt)
        left = quantizer.rounding_error(values, quantizer.decode(codes, scales, fmt))
        out.append(jnp.where(scales > 0, jnp.abs(left).max(-1) / peak, 0.0))
    return jnp.stack(out)


def _check(values: np.ndarray):
    # The quotient that measures the error is itself rounded once in float32.
    measured = np.asarray(_errors(jnp.asarray(values)), np.float64)
    for bits, errors in zip(BITS, measured, strict=True):
        fmt = WireFormat(bits=bits, block_size=BLOCK, rotate=False)
        assert errors.max() <= bounds.contraction(fmt) * (1 + 2.0**-23)
    return measured


@given(st.lists(MAGNITUDES, min_size=BLOCK, max_size=BLOCK))
def test_contraction_bounds_the_error_of_any_block(block):
    _check(np.array([block], np.float32))


def test_contraction_bounds_every_rounding_of_the_scale_and_is_nearly_reached():
    """Peaks all over a binade, with zeros, edges and odd multiples beside them."""
    peaks = np.linspace(1.0, 2.0, 1 << 16, dtype=np.float32)
    steps = np.linspace(-1, 1, BLOCK - 1, dtype=np.float32)
    values = np.concatenate([peaks[:, None], peaks[:, None] * steps], axis=1)
    measured = _check(values)
    for bits, errors in zip(BITS, measured, strict=True):
        fmt = WireFormat(bits=bits, block_size=BLOCK, rotate=False)
        assert errors.max() >= 0.999 * bounds.contraction(fmt)


@pytest.mark.parametrize("bits", BITS)
def test_contraction_covers_the_arithmetic_behind_it(bits):
    fmt = WireFormat(bits=bits)
    least = oracle.contraction(oracle.Format(bits, 64, True))
    assert least <= bounds.contraction(fmt) <= least * (1 + 2.0**-12)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("calls", [1, 2, 20])
def test_residuals_of_adversarial_inputs_stay_within_their_bounds(bits, calls):
    """Each call is chosen, among many, to leave the largest residuals."""
    ranks, block = 3, 16
    fmt = WireFormat(bits=bits, block_size=block, rotate=False)
    twin = oracle.Format(bits, block, False)
    rng = np.random.default_rng(bits)
    bound = error_bound(fmt, ranks=ranks, peak=1.0)
    send = np.zeros((ranks, 500, block), np.float32)
    reduce = np.zeros((500, block), np.float32)
    for _ in range(calls):
        # At the peak, pushing the residual outward, or anywhere.
        outward = np.where(send >= 0, 1, -1) * rng.choice([1.0, 0.5, 0.0], send.shape)
        anywhere = rng.uniform(-1, 1, send.shape)
        x = np.where(rng.random((ranks, 500, 1)) < 0.5, outward, anywhere)
        codes, scales, send = oracle.quantize_blocks(x.astype(np.float32) + send, twin)
        total = oracle.decode(codes, scales, twin).sum(axis=0) + reduce
        reduce = oracle.quantize_blocks(total, twin)[2]
        # Sums of float32 numbers: N + 1 roundings of at most the sum of magnitudes.
        slack = (ranks + 1) * 2.0**-23 * ranks
        assert np.abs(send).max() <= bound.send_residual + slack
        assert np.abs(reduce).max() <= bound.reduce_residual + slack
        owed = np.abs(send.astype(float).sum(0) + reduce).max()
        assert owed <= bound.stream + 2 * slack


@given(
    bits=st.sampled_from(BITS),
    ranks=st.integers(1, 64),
    peak=st.floats(0.0, 1e30),
)
def test_bounds_scale_with_the_peak_and_grow_with_ranks(bits, ranks, peak):
    fmt = WireFormat(bits=bits)
    one = error_bound(fmt, ranks=ranks, peak=1.0)
    scaled = error_bound(fmt, ranks=ranks, peak=peak)
    more = error_bound(fmt, ranks=ranks + 1, peak=1.0)
    for name in ("send_residual", "reduce_residual", "stream", "output"):
        assert math.isclose(getattr(scaled, name), getattr(one, name) * peak)
        assert getattr(more, name) >= getattr(one, name)
    assert one.stream == ranks * one.send_residual + one.reduce_residual
    # Linear in the number of ranks, at any depth.
    assert math.isclose(one.stream, ranks * error_bound(fmt, ranks=1).stream)


@given(bits=st.sampled_from(BITS), ranks=st.integers(1, 64), calls=st.integers(1, 1000))
def test_without_feedback_the_bound_grows_with_the_calls(bits, ranks, calls):
    fmt = WireFormat(bits=bits)
    one = error_bound(fmt, ranks=ranks, calls=1, feedback=False)
    many = error_bound(fmt, ranks=ranks, calls=calls, feedback=False)
    assert math.isclose(many.stream, calls * one.stream)
    # The first call has nothing to repay, so that its error is the smaller one.
    assert one.stream <= error_bound(fmt, ranks=ranks).stream


def test_the_residual_of_four_bits_is_a_fourteenth_of_the_peak():
    c = 1 / 15
    bound = error_bound(WireFormat(bits=4), ranks=1).send_residual
    assert math.isclose(bound, c / (1 - c), rel_tol=2.0**-7)


def test_the_sum_may_be_bounded_by_itself():
    fmt = WireFormat()
    loose = error_bound(fmt, ranks=8)
    tight = error_bound(fmt, ranks=8, sum_peak=1.0)
    assert tight.send_residual == loose.send_residual
    assert tight.reduce_residual < loose.reduce_residual


def test_output_is_the_stream_outside_block_coordinates():
    for block_size, gain in ((16, 4.0), (32, 4.0), (64, 8.0), (128, 8.0), (256, 16.0)):
        fmt = WireFormat(block_size=block_size)
        bound = error_bound(fmt, ranks=2)
        assert bound.output == gain * bound.stream
    flat = error_bound(WireFormat(rotate=False), ranks=2)
    assert flat.output == flat.stream


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks >= 1"),
        ({"ranks": 2.5}, "integer ranks"),
        ({"ranks": 2, "peak": -1.0}, "peak >= 0"),
        ({"ranks": 2, "peak": math.nan}, "peak >= 0"),
        ({"ranks": 2, "peak": math.inf}, "overflows"),
        ({"ranks": 2, "feedback": False}, r"pass calls="),
        ({"ranks": 2, "sum_peak": -1.0}, "sum_peak"),
        ({"ranks": 2, "sum_peak": math.nan}, "sum_peak"),
        ({"ranks": 2, "feedback": False, "calls": -3}, "calls"),
    ],
)
@pytest.mark.usefixtures("as_shipped")
def test_refused_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        error_bound(WireFormat(), **arguments)


@pytest.mark.usefixtures("as_shipped")
def test_a_configuration_is_no_format():
    config = types.SimpleNamespace(format=WireFormat())
    with pytest.raises(TypeError, match=r"that of an EchoConfig is config\.format"):
        error_bound(config, ranks=2)


@pytest.mark.parametrize("rotate", [False, True])
def test_one_round_trip_stays_within_the_bound_outside_block_coordinates(rotate):
    for bits in BITS:
        fmt = WireFormat(bits=bits, block_size=32, rotate=rotate)
        twin = oracle.Format(bits, 32, rotate)
        x = draw(bits, 50, 32)
        blocks = oracle.to_blocks(x, 32)
        peak = np.abs(oracle.rotate(blocks, twin)).max()
        # The transform there adds its own rounding, and so does the one back.
        slack = oracle.rotation_slack(blocks, twin).max() * 2
        bound = bounds.contraction(fmt) * peak + slack

        @jax.jit
        def round_trip(x, fmt=fmt):
            return dequantize(quantize(x, fmt), x.shape, x.dtype, fmt)

        back = round_trip(x)
        assert np.abs(back - x).max() <= bound * bounds.inverse_gain(fmt)
