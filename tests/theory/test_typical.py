"""The bound that is to be expected, and the constants behind it."""

import math

import numpy as np
import pytest

from echo_jax import WireFormat, error_bound
from echo_jax.wire import (
    contraction,
    gaussian_contraction,
    gaussian_stream_error,
    typical_bound,
)
from tests import oracle
from tests.ranks import draw

BITS = (2, 3, 4, 6, 8)


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("block_size", [16, 32, 64, 256])
@pytest.mark.parametrize("bits", BITS)
def test_gaussian_contraction_is_the_error_of_one_rounding(bits, block_size, rotate):
    fmt = WireFormat(bits=bits, block_size=block_size, rotate=rotate)
    twin = oracle.Format(bits, block_size, rotate)
    x = draw(bits, 4000, block_size)
    rounded = oracle.rotate(oracle.to_blocks(x, block_size), twin).astype(np.float32)
    errors = oracle.quantize_blocks(rounded, twin)[2]
    measured = np.sqrt(np.mean(np.square(errors)) / np.mean(np.square(rounded)))
    # The peak of a block is not rounded, and with few levels a Gaussian's density
    # changes within one: the theory is a little above.
    assert 0.92 <= measured / gaussian_contraction(fmt) <= 1.01


def test_gaussian_constants_fall_with_bits_and_grow_with_blocks():
    for constant in (gaussian_contraction, gaussian_stream_error):
        by_bits = [constant(WireFormat(bits=bits)) for bits in BITS]
        assert by_bits == sorted(by_bits, reverse=True)
        by_block = [constant(WireFormat(block_size=16 << i)) for i in range(5)]
        assert by_block == sorted(by_block)
    # The largest of 64 Gaussian magnitudes is about 2.6 standard deviations.
    ratio = gaussian_contraction(WireFormat()) / contraction(WireFormat())
    assert math.isclose(ratio * math.sqrt(3), 2.63, rel_tol=0.01)


def test_typical_bound_grows_like_the_square_root_of_ranks_and_not_with_calls():
    fmt = WireFormat()

    def stream(ranks, **fields):
        total = 2.63 * math.sqrt(ranks)
        return typical_bound(
            fmt, ranks=ranks, values=4096, peak=2.63, sum_peak=total, **fields
        ).stream

    assert math.isclose(stream(512) / stream(2), 16.0)
    assert stream(8) == stream(8, calls=1000)
    plain = [stream(8, feedback=False, calls=calls) for calls in (1, 100)]
    assert math.isclose(plain[1], 10 * plain[0])
    # Residuals in bfloat16 lose 2**-9 of themselves at each call, at random.
    lossy = stream(8, calls=1000, residual_dtype="bfloat16")
    assert 1.0 < lossy / stream(8) < 1.01


def test_typical_bound_is_a_multiple_of_the_gaussian_error():
    """Peaks of Gaussian blocks in, the Gaussian theory out, times the deviations."""
    for bits in BITS:
        fmt = WireFormat(bits=bits)
        peak = gaussian_contraction(fmt) / contraction(fmt) * math.sqrt(3)
        bound = typical_bound(
            fmt, ranks=8, values=4096, peak=peak, sum_peak=peak * math.sqrt(8)
        )
        deviations = math.sqrt(2 * math.log(2 * 4096 / 0.01))
        expected = deviations * gaussian_stream_error(fmt) * math.sqrt(8)
        assert math.isclose(bound.stream, expected, rel_tol=1e-12)


def test_residuals_in_bfloat16_cost_the_worst_case_a_part_a_call():
    bound = error_bound(WireFormat(), ranks=4)
    lossy = error_bound(WireFormat(), ranks=4, calls=513, residual_dtype="bfloat16")
    assert 2.0 < lossy.stream / bound.stream < 2.01
    first = error_bound(WireFormat(), ranks=4, calls=1, residual_dtype="bfloat16")
    assert 1.0 <= first.stream / bound.stream < 1.001


STORAGE = {"float32": 0.0, "bfloat16": 2.0**-9, "int8": 1 / 255, "int4": 1 / 15}


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("bits", [2, 4])
def test_worst_case_holds_for_adversarial_inputs_and_storage(bits, dtype):
    """Residuals stored a little off, always in the direction that hurts."""
    ranks, block, calls = 3, 16, 60
    fmt = WireFormat(bits=bits, block_size=block, rotate=False)
    twin = oracle.Format(bits, block, False)
    rng = np.random.default_rng(bits)
    send = np.zeros((ranks, 200, block), np.float32)
    reduce = np.zeros((200, block), np.float32)
    missing = np.zeros((200, block))

    def store(residual, scales):
        """Part of the value in bfloat16, part of half a scale in the integers."""
        unit = np.abs(residual) if dtype == "bfloat16" else scales[..., None] / 2
        lost = np.sign(residual) * STORAGE[dtype] * unit
        return (residual - lost).astype(np.float32)

    for call in range(1, calls + 1):
        outward = np.where(send >= 0, 1, -1) * rng.choice([1.0, 0.5, 0.0], send.shape)
        x = np.where(
            rng.random((ranks, 200, 1)) < 0.5, outward, rng.uniform(-1, 1, send.shape)
        ).astype(np.float32)
        codes, sent, send = oracle.quantize_blocks(x + send, twin)
        total = oracle.decode(codes, sent, twin).sum(axis=0) + reduce
        codes, scales, reduce = oracle.quantize_blocks(total, twin)
        missing += oracle.decode(codes, scales, twin) - x.astype(float).sum(axis=0)
        bound = error_bound(fmt, ranks=ranks, calls=call, residual_dtype=dtype)
        slack = call * (ranks + 1) * 2.0**-23 * ranks
        assert np.abs(missing).max() <= bound.stream + slack
        send, reduce = store(send, sent), store(reduce, scales)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"values": 0}, "values >= 1"),
        ({"values": 1, "failure": 1.0}, "failure between"),
        ({"values": 1, "residual_dtype": "bfloat16"}, "pass calls="),
        ({"values": 1, "residual_dtype": "int2"}, "not known"),
        ({"values": 1, "peak": math.nan}, "peak >= 0"),
    ],
)
@pytest.mark.usefixtures("as_shipped")
def test_refused_arguments(fields, message):
    with pytest.raises(ValueError, match=message):
        typical_bound(WireFormat(), ranks=2, **fields)
