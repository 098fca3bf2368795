"""Errors cancel from call to call, whatever the depth and the number of ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import echo_jax as echo
from tests import oracle
from tests.ranks import draw, on_ranks

CALLS = 72
SHAPE = (16, 256)  # of the first and last dimension; enough for errors to average


def _config(bits, **fields):
    fmt = echo.WireFormat(bits=bits)
    return echo.EchoConfig(
        format=fmt, **{"min_bytes": 0, "residual_dtype": "float32", **fields}
    )


@functools.cache
def _inputs(calls: int, ranks: int, *shape: int) -> np.ndarray:
    return draw(calls * ranks, calls, ranks, *shape)


def _stream(xs, config, feedback=True):
    """Outputs of calls on ``(calls, ranks, ...)``, then the flush and the residual."""

    def body(xs):
        residual = echo.init_residual(xs[0], "tp", config=config) if feedback else None

        def step(residual, x):
            y, residual = echo.echo_psum(x, residual, "tp", config=config)
            return residual, y

        residual, ys = jax.lax.scan(step, residual, xs)
        rest, after = echo.flush(jnp.zeros_like(xs[0]), residual, "tp", config=config)
        return ys, rest, residual, after

    ys, rest, residual, after = on_ranks(body)(np.moveaxis(xs, 0, 1))
    return np.moveaxis(np.asarray(ys), 0, 1), np.asarray(rest), residual, after


def _relative_error(ys, exact, calls: int) -> float:
    """Error of the sum of the first outputs, relative to one exact output."""
    error = ys[:calls, 0].astype(np.float64).sum(axis=0) - exact[:calls].sum(axis=0)
    return np.linalg.norm(error) / np.sqrt((exact**2).sum() / len(exact))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_c21_outputs_and_what_flush_pays_are_the_sum_of_all_inputs(bits, ranks):
    xs = _inputs(CALLS, ranks, *SHAPE)
    exact = xs.astype(np.float64).sum(axis=1)
    ys, rest, residual, after = _stream(xs, _config(bits))
    total = ys[:, 0].astype(np.float64).sum(axis=0) + rest[0]
    distance = np.linalg.norm(total - exact.sum(axis=0))
    assert distance <= 2e-5 * np.linalg.norm(exact.sum(axis=0))
    # All ranks have the same bits.
    assert (ys == ys[:, :1]).all()
    assert (rest == rest[0]).all()
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(after))
    # The residual is the error, rank by rank.
    owed = np.asarray(residual.send, np.float64).sum(axis=0)
    owed = owed + np.asarray(residual.reduce, np.float64)
    fmt = _config(bits).format
    twin = oracle.Format(fmt.bits, fmt.block_size, fmt.rotate)
    missing = exact.sum(axis=0) - ys[:, 0].astype(np.float64).sum(axis=0)
    owed = oracle.from_blocks(oracle.unrotate(owed, twin), SHAPE)
    assert np.linalg.norm(owed - missing) <= 2e-5 * np.linalg.norm(exact.sum(axis=0))

    # Depth: as good after 72 calls as after 2; far worse without feedback.
    late, early = (_relative_error(ys, exact, n) for n in (CALLS, 2))
    assert late <= 1.15 * early
    assert early <= 1.15 * late
    free, *_ = _stream(xs, _config(bits), feedback=False)
    assert _relative_error(free, exact, CALLS) >= 5 * late


def _bound(config, xs):
    """What every call on ``(calls, ranks, ...)`` keeps to, in block coordinates."""
    fmt = oracle.Format(
        config.format.bits, config.format.block_size, config.format.rotate
    )
    exact = xs.astype(np.float64).sum(axis=1)
    return echo.error_bound(
        config.format,
        ranks=xs.shape[1],
        peak=max(oracle.block_peak(x, fmt) for x in xs.reshape(-1, *xs.shape[2:])),
        sum_peak=max(oracle.block_peak(x, fmt) for x in exact),
    )


@pytest.mark.parametrize("residual_dtype", ["float32", "bfloat16"])
def test_error_is_flat_from_2_to_1000_calls(residual_dtype):
    """Relative to one exact output; measured at 2, 10, 100 and 1,000 calls."""
    ranks, calls = 4, 1000
    config = _config(4, residual_dtype=residual_dtype)
    xs = _inputs(calls, ranks, 8, 128)
    exact = xs.astype(np.float64).sum(axis=1)
    ys, _, _, _ = _stream(xs, config)
    errors = [_relative_error(ys, exact, n) for n in (2, 10, 100, 1000)]
    if residual_dtype == "float32":
        assert max(errors) <= 1.15 * min(errors)
    else:
        # Each call stores w and v rounded to 8 bits: those roundings add up like a
        # random walk of steps of at most 2**-9 of what is owed.
        walk = 2.0**-9 * np.sqrt([2, 10, 100, 1000])
        assert (errors <= 1.15 * errors[0] * (1 + walk)).all()


def test_error_is_flat_from_2_to_64_ranks():
    """Relative to the exact sum: both grow like the square root of the ranks."""
    errors = {}
    for ranks in (2, 8, 64):
        config = _config(4)
        xs = _inputs(6, ranks, 4, 1024)
        exact = xs.astype(np.float64).sum(axis=1)
        ys, _, residual, _ = _stream(xs, config)
        errors[ranks] = _relative_error(ys, exact, 6)
        # The worst case that the bound allows grows like the ranks; it holds.
        twin, bound = oracle.Format(4, 64, True), _bound(config, xs)
        missing = ys[:, 0].astype(np.float64).sum(axis=0) - exact.sum(axis=0)
        assert oracle.block_error(missing, 0 * missing, twin) <= bound.stream
        assert np.abs(residual.send).max() <= bound.send_residual
        assert np.abs(residual.reduce).max() <= bound.reduce_residual
    assert max(errors.values()) <= 1.15 * min(errors.values())


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4, 16, 32, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_error_is_flat_in_depth_for_every_width_and_number_of_ranks(bits, ranks):
    xs = _inputs(200, ranks, 8, 256)
    exact = xs.astype(np.float64).sum(axis=1)
    ys, *_ = _stream(xs, _config(bits))
    errors = [_relative_error(ys, exact, n) for n in (2, 20, 200)]
    assert max(errors) <= 1.15 * min(errors)


def test_both_residuals_are_needed():
    """With either alone the error still grows with the square root of the depth."""
    ranks = 4
    config = _config(4)
    xs = _inputs(CALLS, ranks, 8, 256)
    exact = xs.astype(np.float64).sum(axis=1)

    def body(xs, keep_send, keep_reduce):
        residual = echo.init_residual(xs[0], "tp", config=config)

        def step(residual, x):
            y, residual = echo.echo_psum(x, residual, "tp", config=config)
            keep = (keep_send, keep_reduce)
            return jax.tree.unflatten(
                jax.tree.structure(residual),
                [
                    leaf * k
                    for leaf, k in zip(jax.tree.leaves(residual), keep, strict=True)
                ],
            ), y

        return jax.lax.scan(step, residual, xs)[1]

    run = on_ranks(body)
    by_rank = np.moveaxis(xs, 0, 1)

    def error(send, reduce):
        flags = [np.full(ranks, flag, np.float32) for flag in (send, reduce)]
        ys = np.moveaxis(np.asarray(run(by_rank, *flags)), 0, 1)
        return _relative_error(ys, exact, CALLS)

    both = error(1, 1)
    assert error(0, 1) >= 4 * both
    assert error(1, 0) >= 4 * both
    assert error(0, 0) >= 6 * both


@pytest.mark.parametrize(("shape", "block_size"), [((100, 128), 256), ((100, 20), 64)])
def test_a_call_that_padding_makes_exact_repays(shape, block_size):
    """With fewer bits the call before, on the same tensor, was not exact."""
    fmt = echo.WireFormat(bits=4, block_size=block_size)
    few = echo.EchoConfig(format=fmt, min_bytes=1, residual_dtype="float32")
    many = few.with_bits(8)
    x = jnp.asarray(draw(0, 4, *shape), jnp.bfloat16)
    assert [echo.explain(shape, x.dtype, 4, config).path for config in (few, many)] == [
        "echo",
        "exact",
    ]

    def body(x):
        residual = echo.init_residual(x, "tp", config=few)
        first, residual = echo.echo_psum(x, residual, "tp", config=few)
        second, residual = echo.echo_psum(x, residual, "tp", config=many)
        return first.astype(jnp.float32) + second.astype(jnp.float32), residual

    total, residual = on_ranks(body)(x)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(residual))
    wanted = 2 * np.asarray(x, np.float64).sum(axis=0)
    error = np.linalg.norm(total[0] - wanted) / np.linalg.norm(wanted)
    # Sums, and x with what is owed, are rounded to bfloat16; one 4-bit rounding is 0.1.
    assert error <= 4 * 2.0**-8


def test_scatter_and_gather_telescope_through_the_send_residual():
    ranks, calls = 3, 20
    config = _config(4)
    xs = _inputs(calls, ranks, 6, 128)

    def body(xs):
        residual = echo.init_residual(xs[0], "tp", config=config)

        def step(residuals, x):
            first, second = residuals
            s, first = echo.echo_psum_scatter(x, first, "tp", config=config)
            g, second = echo.echo_all_gather(x, second, "tp", config=config)
            return (first, second), (s, g)

        residuals, sums = jax.lax.scan(step, (residual, residual), xs)
        zero = jnp.zeros_like(xs[0])
        paid = config.exact()
        s, _ = echo.echo_psum_scatter(zero, residuals[0], "tp", config=paid)
        g, _ = echo.echo_all_gather(zero, residuals[1], "tp", config=paid)
        return sums, (s, g)

    (s, g), (rest_s, rest_g) = on_ranks(body)(np.moveaxis(xs, 0, 1))
    exact = xs.astype(np.float64)
    scattered = exact.sum(axis=(0, 1)).reshape(ranks, 2, 128)
    gathered = exact.sum(axis=0).reshape(-1, 128)
    for sums, rest, wanted in ((s, rest_s, scattered), (g, rest_g, gathered)):
        total = np.asarray(sums, np.float64).sum(axis=1) + rest
        assert np.linalg.norm((total - wanted)[0]) <= 2e-5 * np.linalg.norm(wanted)
