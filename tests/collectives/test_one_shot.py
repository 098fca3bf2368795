"""The one-shot algorithm: every rank receives all payloads and adds them up itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import echo_jax as echo
from tests import hlo, oracle
from tests.ranks import MODES, bits_of, draw, mesh, on_ranks

CONFIG = echo.EchoConfig(min_bytes=0, algorithm="one-shot", residual_dtype="float32")
PLAIN = dataclasses.replace(CONFIG, format=echo.WireFormat(rotate=False))
SHAPE = (5, 70)  # ragged blocks, and padding in the last chunk


def _two_calls(config):
    def body(first, second):
        residual = echo.init_residual(first, "tp", config=config)
        y, residual = echo.echo_psum(first, residual, "tp", config=config)
        z, residual = echo.echo_psum(second, residual, "tp", config=config)
        return y, z, residual.send, residual.reduce

    return body


def _one_rounding(parts, owed, fmt):
    """What ranks decode, and owe afterwards: each rank's own rounding and no other."""
    total, left = np.float32(0), []
    for x, kept in zip(parts, owed, strict=True):
        blocks = oracle.to_blocks(x, fmt.block, len(parts)) + np.float32(kept)
        codes, scales, error = oracle.quantize_blocks(blocks, fmt)
        left.append(error)
        total = total + oracle.decode(codes, scales, fmt)
    return oracle.from_blocks(total, parts[0].shape), left


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_two_calls_are_bit_for_bit_those_of_the_oracle(ranks):
    """Quantized once, added in float32 in rank order; nothing is owed by the sums."""
    x = draw(ranks, 2, ranks, *SHAPE)
    y, z, send, reduce = on_ranks(_two_calls(PLAIN))(x[0], x[1])
    fmt, owed = oracle.Format(4, 64, False), [0.0] * ranks
    for out, parts in ((y, x[0]), (z, x[1])):
        expected, owed = _one_rounding(parts, owed, fmt)
        for copy in np.asarray(out):
            np.testing.assert_array_equal(copy, expected)
    np.testing.assert_array_equal(send, np.stack(owed))
    assert not np.asarray(reduce).any()


@pytest.mark.parametrize("residual_dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("mode", MODES)
def test_what_was_summed_plus_what_is_owed_is_what_there_was(mode, residual_dtype):
    config = dataclasses.replace(CONFIG, residual_dtype=residual_dtype)
    x = draw(0, 6, 4, *SHAPE)

    def body(*calls):
        residual = echo.init_residual(calls[0], "tp", config=config)
        total = jnp.zeros(SHAPE)
        for call in calls:
            y, residual = echo.echo_psum(call, residual, "tp", config=config)
            total = total + y
        rest, _ = echo.flush(jnp.zeros(SHAPE), residual, "tp", config=config)
        return total, rest

    total, rest = (np.asarray(part) for part in on_ranks(body, mode=mode)(*x))
    assert (bits_of(total) == bits_of(total[0])).all()
    exact = x.astype(np.float64).sum(axis=(0, 1))
    norm = np.linalg.norm(exact)
    # A residual in few bits forgets a part of each rounding.
    kept = {"float32": 2e-6, "bfloat16": 2e-3, "int8": 2e-3, "int4": 2e-2}
    assert np.linalg.norm(total[0] + rest[0] - exact) <= kept[residual_dtype] * norm
    assert np.linalg.norm(total[0] - exact) > 1e-2 * norm  # something was owed


def test_the_error_is_smaller_than_in_two_shots():
    """One rounding instead of two; as many bytes where there are two ranks."""
    x = draw(0, 2, 64, 256)
    errors = {}
    for algorithm in ("one-shot", "two-shot"):
        config = dataclasses.replace(CONFIG, algorithm=algorithm)
        y, *_ = on_ranks(_two_calls(config))(x, x)
        errors[algorithm] = np.linalg.norm(np.asarray(y)[0] - x.sum(axis=0))
    # Each rank's rounding has variance u; that of their sum, of a magnitude sqrt(2)
    # times as large, has 2 u, and is added to twice u: half of it is saved.
    ratio = errors["one-shot"] / errors["two-shot"]
    assert ratio == pytest.approx(0.5**0.5, rel=0.05)


def test_the_error_of_any_number_of_calls_is_what_the_ranks_owe():
    """At most N times the bound of a rank's residual, and none of the sums."""
    ranks, calls = 3, 40
    x = draw(0, calls, ranks, *SHAPE)

    def body(parts):
        def call(carry, part):
            total, residual = carry
            y, residual = echo.echo_psum(part, residual, "tp", config=PLAIN)
            return (total + y, residual), total + y

        residual = echo.init_residual(parts[0], "tp", config=PLAIN)
        return lax.scan(call, (jnp.zeros(SHAPE), residual), parts)[1]

    totals = np.asarray(on_ranks(body)(x.swapaxes(0, 1)))[0].astype(np.float64)
    exact = np.cumsum(x.astype(np.float64).sum(axis=1), axis=0)
    bound = echo.error_bound(PLAIN.format, ranks=ranks, peak=float(np.abs(x).max()))
    slack = calls * 2.0**-23 * np.abs(exact).max()
    assert np.abs(totals - exact).max() <= ranks * bound.send_residual + slack


def test_pieces_change_no_bit():
    x = draw(0, 2, 3, 4, 300)
    whole, *cut = (
        dataclasses.replace(CONFIG, residual_dtype="int8", num_chunks=number)
        for number in (1, 3, 1000)
    )
    expected = on_ranks(_two_calls(whole))(x[0], x[1])
    for config in cut:
        got = on_ranks(_two_calls(config))(x[0], x[1])
        for one, other in zip(
            jax.tree.leaves(got), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(bits_of(one), bits_of(other))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_sum_onto_a_stream_is_rounded_once_more(dtype):
    x, h = draw(0, 3, *SHAPE, dtype=dtype), draw(1, *SHAPE, dtype=dtype, scale=30.0)

    def body(x, h):
        onto, _ = echo.echo_psum(x, None, "tp", add_to=h, config=PLAIN)
        y, _ = echo.echo_psum(x.astype("float32"), None, "tp", config=PLAIN)
        return onto, (h.astype("float32") + y).astype(dtype)

    got, want = on_ranks(body, replicated=(1,))(x, h)
    np.testing.assert_array_equal(bits_of(got), bits_of(want))


def test_calls_of_both_algorithms_share_a_residual():
    """What a two-shot call's sums owe waits until the next one, or a flush."""
    two = dataclasses.replace(CONFIG, algorithm="two-shot")
    x = draw(0, 4, *SHAPE)

    def body(x):
        residual = echo.init_residual(x, "tp", config=two)
        total = jnp.zeros(SHAPE)
        for config in (two, CONFIG, CONFIG, two, CONFIG):
            y, residual = echo.echo_psum(x, residual, "tp", config=config)
            total = total + y
        rest, _ = echo.flush(jnp.zeros(SHAPE), residual, "tp", config=CONFIG)
        return total + rest

    got = np.asarray(on_ranks(body)(x))
    exact = 5 * x.astype(np.float64).sum(axis=0)
    assert np.linalg.norm(got[0] - exact) <= 4e-6 * np.linalg.norm(exact)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_psum_forward_and_backward(mode):
    x, h = draw(0, 4, *SHAPE), draw(1, *SHAPE)

    def body(x, h):
        residual = echo.init_residual(x, "tp", config=CONFIG)
        mine, residual = echo.echo_pvary(h, residual, "tp", config=CONFIG)

        def loss(x, h):
            y, _ = echo.echo_psum(x, residual, "tp", config=CONFIG)
            return jnp.sum(y * h)

        forward = jax.grad(loss)(x, h)
        _, pull = jax.vjp(
            lambda h: echo.echo_pvary(h, residual, "tp", config=CONFIG)[0], h
        )
        (summed,) = pull(x + 0 * mine)
        return forward, summed

    forward, summed = on_ranks(body, mode=mode, replicated=(1,))(x, h)
    for copy in np.asarray(forward):
        np.testing.assert_array_equal(copy, h)
    bound = echo.error_bound(
        CONFIG.format, ranks=4, peak=8 * float(np.abs(x).max()), calls=1
    )
    assert np.abs(np.asarray(summed) - x.sum(axis=0)).max() <= bound.output


@pytest.mark.parametrize("ranks", [2, 8])
def test_one_gather_of_exactly_the_documented_bytes_is_all_that_crosses(ranks):
    x = jax.ShapeDtypeStruct((ranks, *SHAPE), "bfloat16")

    def body(x):
        residual = echo.init_residual(x[0], "tp", config=CONFIG)
        y, residual = echo.echo_psum(x[0], residual, "tp", config=CONFIG)
        return y[None], residual.send[None]

    spec = P("tp")
    run = jax.shard_map(body, mesh=mesh(tp=ranks), in_specs=spec, out_specs=spec)
    compiled = jax.jit(run).lower(x).compile()
    (one,) = hlo.collectives(compiled)
    assert (one.op, one.dtype) == ("all-gather", "u8")
    sent = one.buffer_bytes * (ranks - 1) // ranks
    assert echo.wire_bytes(SHAPE, ranks, CONFIG) == {"all_gather": sent}
    two = dataclasses.replace(CONFIG, algorithm="two-shot")
    in_two = sum(echo.wire_bytes(SHAPE, ranks, two).values())
    assert sent == in_two * ranks // 2


def test_the_collectives_with_one_exchange_have_no_choice():
    two = dataclasses.replace(CONFIG, algorithm="two-shot")
    for verb in ("psum_scatter", "all_gather"):
        sent = [echo.wire_bytes((8, 64), 4, c, verb=verb) for c in (CONFIG, two)]
        assert sent[0] == sent[1]
