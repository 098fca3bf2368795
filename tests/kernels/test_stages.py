"""Every backend's stages against the oracle; a new backend joins ``BACKENDS``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import WireFormat
from echo_jax.kernels import get_codec
from tests import oracle
from tests.ranks import draw

BACKENDS = ("xla",)
FORMATS = [
    (bits, block_size, rotate)
    for bits, block_size in ((2, 32), (3, 16), (4, 64), (6, 128), (8, 256))
    for rotate in (False, True)
]
CHUNKS = 3
SHAPE = (4, 300)

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def _formats(bits, block_size, rotate):
    return (
        WireFormat(bits=bits, block_size=block_size, rotate=rotate),
        oracle.Format(bits, block_size, rotate),
    )


def _sent(fmt, twin, ranks=CHUNKS):
    """Payloads as they arrive from the ranks, made by the oracle."""
    blocks = draw(7, ranks, 5, fmt.block_size)
    quantized = [oracle.quantize_blocks(block, twin) for block in blocks]
    payloads = np.stack(
        [
            np.frombuffer(oracle.pack(codes, scales, twin), np.uint8)
            for codes, scales, _ in quantized
        ]
    )
    decoded = [oracle.decode(codes, scales, twin) for codes, scales, _ in quantized]
    return jnp.asarray(payloads), decoded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_send_pays_the_residual_and_keeps_exactly_what_it_did_not_send(
    form, dtype, backend
):
    fmt, twin = _formats(*form)
    codec = get_codec(backend, fmt)
    x = draw(1, *SHAPE)
    blocks = oracle.to_blocks(x, fmt.block_size, CHUNKS)
    owed = draw(2, *blocks.shape, dtype=dtype, scale=0.1)
    send = jax.jit(lambda x, r: codec.send(x, r, fmt=fmt, chunks=CHUNKS))
    payloads, left = send(jnp.asarray(x), jnp.asarray(owed))
    assert payloads.shape == (CHUNKS, blocks.shape[1] * fmt.block_bytes)
    assert left.dtype == dtype
    values = oracle.rotate(blocks, twin) + owed.astype(np.float64)
    slack = oracle.rotation_slack(blocks, twin)
    # The sum with the residual is one more float32 rounding.
    slack = slack + np.abs(values).max(axis=-1) * oracle.EPS32 / 2
    decoded = np.zeros(blocks.shape)
    for chunk in range(CHUNKS):
        payload = np.asarray(payloads[chunk]).tobytes()
        oracle.assert_payload_of(payload, values[chunk], slack[chunk], twin)
        decoded[chunk] = oracle.decode(*oracle.unpack(payload, twin), twin)
    rounding = {"float32": 2.0**-24, "bfloat16": 2.0**-8}[dtype] * np.abs(left)
    distance = np.abs(decoded + np.asarray(left, np.float64) - values)
    assert (distance <= slack[..., None] + rounding).all()
    if not fmt.rotate:
        exact = blocks + owed.astype(np.float32)
        codes, scales, error = oracle.quantize_blocks(exact, twin)
        for chunk in range(CHUNKS):
            expected = oracle.pack(codes[chunk], scales[chunk], twin)
            assert np.asarray(payloads[chunk]).tobytes() == expected
        np.testing.assert_array_equal(left, error.astype(owed.dtype))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_reduce_is_bit_for_bit_that_of_the_oracle(form, backend):
    """It stays in block coordinates, so the contract leaves nothing open."""
    fmt, twin = _formats(*form)
    codec = get_codec(backend, fmt)
    payloads, decoded = _sent(fmt, twin)
    owed = draw(3, *decoded[0].shape, scale=0.1)
    reduce = jax.jit(lambda p, r: codec.reduce(p, r, fmt=fmt))
    payload, left = reduce(payloads, jnp.asarray(owed))
    total = ((decoded[0] + decoded[1]) + decoded[2]) + owed
    codes, scales, error = oracle.quantize_blocks(total, twin)
    assert np.asarray(payload).tobytes() == oracle.pack(codes, scales, twin)
    np.testing.assert_array_equal(left, error)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_return_is_exact_up_to_one_rounding_to_the_dtype(form, backend):
    fmt, twin = _formats(*form)
    codec = get_codec(backend, fmt)
    payloads, decoded = _sent(fmt, twin)
    width = 5 * fmt.block_size * CHUNKS - 3
    for dtype in ("float32", "bfloat16"):
        back = functools.partial(
            codec.return_, shape=(1, width), dtype=jnp.dtype(dtype), fmt=fmt
        )
        y = jax.jit(back)(payloads[None])
        exact = oracle.unrotate(np.stack(decoded), twin).reshape(1, -1)[:, :width]
        expected = exact.astype(np.float32).astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize(
    ("form", "ranks"), [*((form, 3) for form in FORMATS), (FORMATS[0], 17)], ids=str
)
def test_return_of_many_ranks_rounds_once_for_each_addition(form, ranks, backend):
    """Decoding is exact; float32 additions in rank order are all that rounds."""
    fmt, twin = _formats(*form)
    codec = get_codec(backend, fmt)
    payloads, decoded = _sent(fmt, twin)
    order = [np.roll(np.arange(CHUNKS), rank) for rank in range(ranks)]
    total = np.float32(0)
    for chunks in order:
        exact = oracle.unrotate(np.stack(decoded)[chunks], twin)
        total = total + exact.astype(np.float32)
    width = 5 * fmt.block_size * CHUNKS - 3
    back = functools.partial(
        codec.return_, shape=(1, width), dtype=jnp.float32, fmt=fmt
    )
    y = jax.jit(back)(jnp.stack([payloads[chunks] for chunks in order]))
    np.testing.assert_array_equal(y, total.reshape(1, -1)[:, :width])


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_sum_chunks_is_the_sum_of_reduce_in_full_precision(form, backend):
    fmt, twin = _formats(*form)
    codec = get_codec(backend, fmt)
    payloads, decoded = _sent(fmt, twin)
    shape = (5, fmt.block_size)
    add = functools.partial(codec.sum_chunks, shape=shape, dtype=jnp.float32, fmt=fmt)
    y = jax.jit(add)(payloads)
    total = (decoded[0] + decoded[1]) + decoded[2]
    slack = np.abs(total).astype(np.float64).sum(-1) * (fmt.block_size - 1)
    slack *= oracle.gains(twin)[1] * 2.0**-24 * fmt.rotate
    assert (np.abs(y - oracle.unrotate(total, twin)) <= slack[:, None]).all()


@pytest.mark.parametrize("ranks", [1, 2, 16, 17, 20])
def test_sums_of_many_ranks_are_in_rank_order(ranks, backend):
    """Unrolled or looped, the float32 additions are the same ones."""
    fmt, twin = _formats(8, 16, False)
    codec = get_codec(backend, fmt)
    payloads, decoded = _sent(fmt, twin, ranks)
    total = decoded[0]
    for part in decoded[1:]:
        total = total + part
    add = functools.partial(codec.sum_chunks, shape=(5, 16), dtype=jnp.float32, fmt=fmt)
    y = jax.jit(add)(payloads)
    np.testing.assert_array_equal(y, total)


def test_without_a_residual_none_comes_back(backend):
    fmt, _ = _formats(4, 64, True)
    codec = get_codec(backend, fmt)
    send = jax.jit(lambda x: codec.send(x, None, fmt=fmt, chunks=CHUNKS))
    payloads, left = send(jnp.ones(SHAPE))
    assert left is None
    payload, left = jax.jit(lambda p: codec.reduce(p, None, fmt=fmt))(payloads)
    assert left is None
    assert payload.shape == payloads.shape[1:]
