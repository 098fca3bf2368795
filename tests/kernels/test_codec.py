import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_jax
from echo_jax import WireFormat
from tests import oracle
from tests.ranks import bits_of, draw

BITS = (2, 3, 4, 6, 8)
BLOCKS = (16, 32, 64, 128, 256)
# Every width and every block size by default, every pair of them among the long tests.
GRID = [
    pytest.param(bits, block_size, marks=[pytest.mark.long] * (i not in (j, j + 1)))
    for i, bits in enumerate(BITS)
    for j, block_size in enumerate(BLOCKS)
]
DTYPES = ("float32", "bfloat16", "float16")

# One compilation each; op by op takes ten times as long.
quantize = jax.jit(echo_jax.quantize, static_argnames=("fmt", "backend"))
dequantize = jax.jit(
    echo_jax.dequantize, static_argnames=("shape", "dtype", "fmt", "backend")
)


@pytest.mark.parametrize(("bits", "block_size"), GRID)
def test_bytes_without_rotation_are_those_of_the_oracle(bits, block_size):
    fmt = WireFormat(bits=bits, block_size=block_size, rotate=False)
    twin = oracle.Format(bits, block_size, False)
    x = draw(bits + block_size, 5, 2 * block_size + 7, scale=10.0)
    payload = quantize(jnp.asarray(x), fmt)
    assert np.asarray(payload).tobytes() == oracle.quantize(x, twin)
    assert payload.size == 15 * fmt.block_bytes
    back = dequantize(payload, x.shape, x.dtype, fmt)
    expected = oracle.dequantize(np.asarray(payload).tobytes(), x.shape, twin)
    np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize(("bits", "block_size"), GRID)
def test_bytes_with_rotation_differ_only_at_rounding_edges(bits, block_size):
    fmt = WireFormat(bits=bits, block_size=block_size, rotate=True)
    twin = oracle.Format(bits, block_size, True)
    x = draw(bits + block_size, 5, 2 * block_size + 7, scale=10.0)
    payload = quantize(jnp.asarray(x), fmt)
    blocks = oracle.to_blocks(x, block_size)[0]
    oracle.assert_payload_of(
        np.asarray(payload).tobytes(),
        oracle.rotate(blocks, twin),
        oracle.rotation_slack(blocks, twin),
        twin,
    )
    # Coming out, the transform acts on integers and is exact.
    back = dequantize(payload, x.shape, x.dtype, fmt)
    expected = oracle.dequantize(np.asarray(payload).tobytes(), x.shape, twin)
    np.testing.assert_array_equal(back, expected)


@settings(max_examples=12)
@given(
    shape=st.lists(st.integers(0, 40), max_size=4).map(tuple),
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(DTYPES),
    rotate=st.booleans(),
)
def test_any_shape_and_dtype_makes_the_round_trip(shape, bits, dtype, rotate):
    fmt = WireFormat(bits=bits, block_size=16, rotate=rotate)
    x = draw(len(shape), *shape, dtype=dtype)
    payload = quantize(jnp.asarray(x), fmt)
    rows = int(np.prod(shape[:-1])) if shape else 1
    width = shape[-1] if shape else 1
    assert payload.shape == (rows * -(-width // 16) * fmt.block_bytes,)
    back = dequantize(payload, shape, x.dtype, fmt)
    assert back.shape == shape
    assert back.dtype == x.dtype
    if x.size:
        # Exact in float64, then rounded once to the dtype.
        twin = oracle.Format(bits, 16, rotate)
        exact = oracle.dequantize(np.asarray(payload).tobytes(), shape, twin)
        np.testing.assert_array_equal(back, exact.astype(np.float32).astype(x.dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_short_dtypes_send_what_their_values_in_float32_send(dtype):
    x = draw(0, 4, 100, dtype=dtype)
    short = quantize(jnp.asarray(x))
    np.testing.assert_array_equal(short, quantize(jnp.asarray(x.astype(np.float32))))


def test_a_block_does_not_depend_on_its_neighbours():
    fmt = WireFormat()
    x = draw(0, 6, 128)
    whole = dequantize(quantize(jnp.asarray(x), fmt), x.shape, x.dtype, fmt)
    other = draw(1, 6, 128)
    other[2, :64] = x[2, :64]
    mixed = dequantize(quantize(jnp.asarray(other), fmt), x.shape, x.dtype, fmt)
    np.testing.assert_array_equal(whole[2, :64], mixed[2, :64])


def test_numpy_arrays_are_arrays(as_shipped):
    x = draw(0, 4, 64)
    payload = np.asarray(echo_jax.quantize(x))
    np.testing.assert_array_equal(payload, echo_jax.quantize(jnp.asarray(x)))
    np.testing.assert_array_equal(
        echo_jax.dequantize(payload, x.shape),
        echo_jax.dequantize(jnp.asarray(payload), x.shape),
    )


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64"])
def test_refused_dtypes(dtype, as_shipped):
    with pytest.raises(ValueError, match=f"float32, bfloat16 or float16, got {dtype}"):
        echo_jax.quantize(jnp.zeros((4,), dtype))


@pytest.mark.parametrize(
    ("payload", "shape"),
    [
        (np.zeros(33, np.uint8), (64,)),
        (np.zeros(68, np.uint8), (64,)),
        (np.zeros(34, np.int8), (64,)),
        (np.zeros((1, 34), np.uint8), (64,)),
    ],
)
def test_a_payload_of_another_shape_or_format_is_refused(payload, shape, as_shipped):
    with pytest.raises(ValueError, match=r"int8 would cut the decoded values"):
        echo_jax.dequantize(np.zeros(34, np.uint8), (64,), "int8")
    with pytest.raises(ValueError, match=r"takes a payload of 34 uint8 values, got"):
        echo_jax.dequantize(jnp.asarray(payload), shape)


@pytest.mark.parametrize("backend", ["triton", "pallas"])
def test_an_explicit_backend_that_cannot_run_raises(backend):
    from echo_jax.kernels import get_codec

    try:
        codec = get_codec(backend, WireFormat())
    except ValueError as error:
        assert backend in str(error)  # noqa: PT017
        assert "auto" in str(error)  # noqa: PT017
    else:
        assert codec.name == backend


def test_an_unknown_backend_is_refused(as_shipped):
    with pytest.raises(ValueError, match="backend='cuda'"):
        echo_jax.quantize(jnp.zeros((4, 64)), backend="cuda")


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rotate", [False, True])
def test_c02_scaling_by_powers_of_two_is_exact_from_1e_30_to_1e30(bits, rotate):
    fmt = WireFormat(bits=bits, block_size=32, rotate=rotate)
    x = draw(3, 4, 96)
    once = dequantize(quantize(jnp.asarray(x), fmt), x.shape, x.dtype, fmt)
    for exponent in (-100, -67, -10, -1, 1, 33, 100):
        factor = np.float32(2.0**exponent)
        scaled = jnp.asarray(x * factor)
        again = dequantize(quantize(scaled, fmt), x.shape, x.dtype, fmt)
        np.testing.assert_array_equal(again, np.asarray(once) * factor)


@pytest.mark.parametrize("bits", BITS)
def test_c03_a_zero_block_is_exactly_zero(bits):
    for rotate in (False, True):
        fmt = WireFormat(bits=bits, block_size=16, rotate=rotate)
        x = draw(0, 2, 48)
        x[:, 16:32] = 0.0
        back = dequantize(quantize(jnp.asarray(x), fmt), x.shape, x.dtype, fmt)
        assert not bits_of(np.abs(back[:, 16:32])).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_c04_a_value_that_is_not_finite_shows_in_its_block_only(bad):
    for rotate in (False, True):
        fmt = WireFormat(block_size=16, rotate=rotate)
        x = draw(0, 3, 48)
        x[1, 20] = bad
        back = dequantize(quantize(jnp.asarray(x), fmt), x.shape, x.dtype, fmt)
        expected = np.zeros(x.shape, bool)
        expected[1, 16:32] = True
        np.testing.assert_array_equal(np.isnan(back), expected)
