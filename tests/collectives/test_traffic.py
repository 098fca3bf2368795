"""Bytes and paths: static, exact, and said aloud."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import echo_jax as echo
from tests.ranks import bits_of, draw, on_ranks

BITS = (2, 3, 4, 6, 8)


@given(
    shape=st.lists(st.integers(1, 300), min_size=1, max_size=3).map(tuple),
    ranks=st.integers(1, 9),
    bits=st.sampled_from(BITS),
    block_size=st.sampled_from([16, 64, 256]),
)
def test_bytes_are_whole_blocks_and_scales_for_every_other_rank(
    shape, ranks, bits, block_size
):
    fmt = echo.WireFormat(bits=bits, block_size=block_size)
    config = echo.EchoConfig(format=fmt, min_bytes=0)
    rows = int(np.prod(shape[:-1]))
    blocks = rows * -(-shape[-1] // block_size)
    block_bytes = block_size * bits // 8 + 2
    chunk = -(-blocks // ranks) * block_bytes
    sent = {"all_to_all": (ranks - 1) * chunk, "all_gather": (ranks - 1) * chunk}
    assert echo.wire_bytes(shape, ranks, config) == sent
    gathered = {"all_gather": (ranks - 1) * blocks * block_bytes}
    assert echo.wire_bytes(shape, ranks, config, verb="all_gather") == gathered
    explanation = echo.explain(shape, "bfloat16", ranks, config)
    assert explanation.wire_bytes == sent
    assert explanation.path == "echo"


def test_scatter_blocks_start_anew_in_every_part():
    config = echo.EchoConfig(min_bytes=0, format=echo.WireFormat(block_size=64))
    # Along the last dimension each part of 20 is a ragged block of its own.
    sent = echo.wire_bytes((8, 80), 4, config, verb="psum_scatter", scatter_dimension=1)
    assert sent == {"all_to_all": 3 * 8 * 34}
    sent = echo.wire_bytes((8, 80), 4, config, verb="psum_scatter")
    assert sent == {"all_to_all": 3 * 2 * 2 * 34}


def test_exact_bytes_are_those_of_a_ring():
    config = echo.EchoConfig()
    assert echo.wire_bytes((8, 64), 8, config) == {"all_reduce": 2 * 7 * 128}
    for verb, sent in (("psum_scatter", 7 * 128), ("all_gather", 7 * 1024)):
        assert echo.wire_bytes((8, 64), 8, config, verb=verb) == {verb: sent}
    assert echo.wire_bytes((0, 64), 8, config) == {"all_reduce": 0}


def test_c07_the_path_is_decided_by_static_size_alone():
    """Half open at min_bytes, alike for every dtype, and said by explain."""
    config = echo.EchoConfig(min_bytes=1024)
    paths = {
        ((256,), "float32"): "echo",
        ((255,), "float32"): "exact",
        ((512,), "bfloat16"): "echo",
        ((511,), "bfloat16"): "exact",
        ((0,), "float32"): "exact",
        ((), "float32"): "exact",
    }
    for (shape, dtype), path in paths.items():
        explanation = echo.explain(shape, dtype, 4, config)
        assert explanation.path == path
        assert set(explanation.wire_bytes) == (
            {"all_reduce"} if path == "exact" else {"all_to_all", "all_gather"}
        )
        assert explanation.backend == (None if path == "exact" else "xla")
        # Twice the same question, twice the same answer.
        assert echo.explain(shape, dtype, 4, config) == explanation
    every = echo.EchoConfig(min_bytes=0)
    assert echo.explain((), "float32", 4, every).path == "echo"
    assert echo.explain((1 << 20,), "float32", 4, every.exact()).path == "exact"


def test_a_scatter_whose_parts_are_narrow_is_exact_where_padding_costs_more():
    """Of a block of 64 along the last axis, each of 8 ranks has 8 values."""
    config = echo.EchoConfig(min_bytes=1)
    shape, options = (64, 64), {"verb": "psum_scatter", "scatter_dimension": 1}
    narrow = echo.explain(shape, "bfloat16", 8, config, **options)
    assert narrow.path == "exact"
    assert "padding them would turn the 8,192 B of x into 17,408 B" in narrow.reason
    assert set(narrow.wire_bytes) == {"psum_scatter"}
    always = echo.EchoConfig(min_bytes=0)
    assert echo.explain(shape, "bfloat16", 8, always, **options).path == "echo"
    assert echo.explain((64, 512), "bfloat16", 8, config, **options).path == "echo"
    x = draw(0, 8, *shape)

    def body(x):
        return echo.echo_psum_scatter(
            x, None, "tp", scatter_dimension=1, config=config
        )[0]

    found = np.moveaxis(np.asarray(on_ranks(body)(x)), 0, 1).reshape(shape)
    np.testing.assert_allclose(found, x.sum(axis=0), rtol=0, atol=8 * 2.0**-20)


def test_explanations_read_well():
    small = str(echo.explain((1, 4096), "bfloat16", 8))
    assert "exact" in small
    assert "8,192 B" in small
    assert "min_bytes=262,144" in small
    large = str(echo.explain((4096, 4096), "bfloat16", 8))
    assert large.startswith("echo on the xla backend")
    assert "all_to_all" in large
    assert "0.266 of the exact" in large
    assert "configured to be exact" in str(
        echo.explain((4096, 4096), "bfloat16", 8, echo.EchoConfig().exact())
    )


def test_c08_a_small_call_is_lax_psum_bit_for_bit_and_leaves_the_residual():
    """By default a decode step of one token is exact; an exact call pays as well."""
    from jax import lax

    large = echo.EchoConfig(min_bytes=0, residual_dtype="float32")
    default = echo.EchoConfig(residual_dtype="float32")
    x = draw(0, 5, 3, 100)

    def body(x):
        zero = echo.init_residual(x, "tp", config=default)
        y, owed = echo.echo_psum(x, zero, "tp", config=large)
        scatter = functools.partial(echo.echo_psum_scatter, scatter_dimension=1)
        return {
            "exact": lax.psum(x, "tp"),
            "plain": echo.echo_psum(x, None, "tp", config=default)[0],
            "small": echo.echo_psum(x, owed, "tp", config=default),
            "paying": echo.echo_psum(x, owed, "tp", config=default.exact()),
            "scattered": scatter(x, None, "tp", config=default)[0],
            "coded": (y, owed),
        }

    for mode in ("vmap", "vma"):
        found = on_ranks(body, mode=mode)(x)
        (y, owed), (small, kept) = found["coded"], found["small"]
        for total in (found["plain"], small):
            np.testing.assert_array_equal(bits_of(total), bits_of(found["exact"]))
        assert np.asarray(owed.send).any()
        jax.tree.map(np.testing.assert_array_equal, kept, owed)
        paying, after = found["paying"]
        assert not np.asarray(after.send).any()
        assert not np.asarray(after.reduce).any()
        both = 2 * x.astype(np.float64).sum(axis=0)
        assert np.linalg.norm(y[0] + paying[0] - both) <= 2e-6 * np.linalg.norm(both)
        whole = np.moveaxis(np.asarray(found["scattered"]), 0, 1).reshape(3, 100)
        np.testing.assert_allclose(whole, found["exact"][0], rtol=0, atol=5 * 2.0**-20)
    assert echo.explain((3, 100), "float32", 5, default).path == "exact"


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("function", ["wire_bytes", "explain"])
def test_refused_questions(function):
    def ask(shape, dtype, ranks, **options):
        if function == "explain":
            return echo.explain(shape, dtype, ranks, **options)
        return echo.wire_bytes(shape, ranks, dtype=dtype, **options)

    big = echo.EchoConfig(min_bytes=0)
    with pytest.raises(ValueError, match=r"dtype int32 is not supported.*Cast x first"):
        ask((4,), "int32", 2)
    with pytest.raises(ValueError, match="axis_size=0"):
        ask((4,), "float32", 0)
    with pytest.raises(ValueError, match=r"has 6 entries.*pad it to 8"):
        ask((6, 4), "float32", 4, config=big, verb="psum_scatter")
    with pytest.raises(ValueError, match=r"out of range for x of shape \(6, 4\)"):
        ask((6, 4), "float32", 2, config=big, verb="psum_scatter", scatter_dimension=2)
    with pytest.raises(ValueError, match="verb='all_to_all'"):
        ask((6, 4), "float32", 2, config=big, verb="all_to_all")
    with pytest.raises(TypeError, match=r"shape must be a tuple, got int.*x\.shape"):
        ask(64, "float32", 2)
    with pytest.raises(TypeError) as refusal:  # not with the values of the array
        ask(np.zeros((64, 64)), "float32", 2)
    assert "got ndarray" in str(refusal.value)
    assert len(str(refusal.value)) < 100


@pytest.mark.usefixtures("as_shipped")
def test_a_backend_that_cannot_run_is_explained_before_it_is_called():
    from echo_jax.kernels import get_codec

    for backend in ("triton", "pallas"):
        config = echo.EchoConfig(min_bytes=0, backend=backend)
        try:
            name = get_codec(backend, config.format).name
        except ValueError:
            with pytest.raises(ValueError, match=f"backend='{backend}'"):
                echo.explain((64, 64), "bfloat16", 8, config)
        else:
            assert echo.explain((64, 64), "bfloat16", 8, config).backend == name


def test_dtypes_may_be_given_as_types():
    for dtype in (jnp.bfloat16, "bfloat16", jnp.dtype("bfloat16")):
        assert echo.explain((8, 64), dtype, 8).x_bytes == 1024
