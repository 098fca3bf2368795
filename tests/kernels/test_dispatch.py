"""Who runs the codec, and how it batches; on a CPU, where the definition runs."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import echo_jax as echo
from echo_jax.kernels import api, dispatch, get_codec, pallas, xla
from echo_jax.wire import compact

FMT = echo.WireFormat(block_size=32)
CHUNKS = 4
SHAPE = (6, 100)  # ragged blocks, and padding in the last chunk
BLOCKS = 6
NO_PLUGIN = all(
    importlib.util.find_spec(name) is None
    for name in ("jax_cuda13_plugin", "jax_cuda12_plugin")
)


def send(x, residual):
    return dispatch.send(pallas, True, x, residual, fmt=FMT, chunks=CHUNKS)


def expected(x, residual):
    return xla.send(x, residual, fmt=FMT, chunks=CHUNKS)


def messages(*batch):
    x = jax.random.normal(jax.random.key(0), (*batch, *SHAPE), jnp.bfloat16)
    shape = (*batch, CHUNKS, BLOCKS, FMT.block_size)
    return x, jax.random.normal(jax.random.key(1), shape) / 16


def assert_same(got, want):
    jax.tree.map(
        functools.partial(np.testing.assert_array_equal, strict=True), got, want
    )


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_vmap_is_one_batch(depth):
    got, want = send, expected
    for _ in range(depth):
        got, want = jax.vmap(got), jax.vmap(want)
    arguments = messages(*(2, 3)[:depth])
    assert_same(jax.jit(got)(*arguments), jax.jit(want)(*arguments))


def test_vmap_over_some_arguments():
    x, residual = messages(3)
    got = jax.jit(jax.vmap(send, in_axes=(0, None)))(x, residual[0])
    want = jax.jit(jax.vmap(expected, in_axes=(0, None)))(x, residual[0])
    assert_same(got, want)


@pytest.mark.parametrize("residual", [None, "compact"])
def test_other_residuals_batch_too(residual):
    x, values = messages(3)
    kept = None if residual is None else compact.zeros(values.shape)
    got = jax.jit(jax.vmap(send))(x, kept)
    assert_same(got, jax.jit(jax.vmap(expected))(x, kept))


def test_types_vary_as_the_arguments_do():
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("tp")

    def local(x, residual):
        payloads, left = send(x[0], residual[0])
        assert jax.typeof(payloads).manual_axis_type.varying == {"tp"}
        back = dispatch.return_(
            pallas,
            True,
            payloads[None],
            shape=SHAPE,
            dtype=x.dtype,
            fmt=FMT,
            stream=x[0],
        )
        return payloads[None], left[None], back[None]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    payloads, left, back = jax.jit(mapped)(*messages(2))
    want = jax.jit(jax.vmap(expected))(*messages(2))
    assert_same((payloads, left), want)
    read = functools.partial(xla.return_, shape=SHAPE, dtype=back.dtype, fmt=FMT)
    assert_same(
        back,
        jax.jit(jax.vmap(lambda p, x: read(p[None], stream=x)))(
            payloads, messages(2)[0]
        ),
    )


@pytest.mark.skipif(not NO_PLUGIN, reason="a CUDA plugin is installed")
def test_without_a_plugin_nothing_but_the_definition_is_traced():
    assert get_codec("auto", FMT) is api.XLA


@pytest.mark.parametrize("found", ["triton", "pallas"])
def test_auto_says_who_runs_where(found, monkeypatch):
    monkeypatch.setattr(api, "_best_kernels", lambda: found)
    monkeypatch.setattr(
        api,
        "_with_kernels",
        lambda name, elsewhere: dataclasses.replace(api.XLA, name=name + elsewhere),
    )
    assert get_codec("auto", FMT).name == found + "xla"
    # Codes in two planes have kernels in Triton only.
    for bits in (3, 6):
        chosen = get_codec("auto", echo.WireFormat(bits=bits)).name
        assert chosen == {"triton": "tritonxla", "pallas": "xla"}[found]


@pytest.mark.parametrize("backend", ["triton", "pallas"])
def test_an_explicit_choice_never_falls_back(backend):
    with pytest.raises(ValueError, match=r"needs an NVIDIA GPU.*auto"):
        get_codec(backend, FMT)
    refused = r"no kernels for 3 bits.*\(2, 4, 8\)"
    with pytest.raises(ValueError, match="needs" if backend == "triton" else refused):
        get_codec(backend, echo.WireFormat(bits=3))


@pytest.mark.parametrize(
    ("jax_version", "version", "works"),
    [
        ((0, 12, 0), (0, 4, 1), False),
        ((0, 12, 0), (0, 3, 1), True),
        ((0, 11, 2), (0, 4, 1), True),
    ],
)
def test_versions_that_do_not_work_together_are_named(
    jax_version, version, works, monkeypatch
):
    """As an ImportError, for which "auto" takes Pallas, and "triton" gives the text."""
    written = ".".join(map(str, version))
    there = types.SimpleNamespace(
        triton_call=lambda *args, out_type=None: None,
        __version__=written,
        __version_info__=version,
    )
    monkeypatch.setitem(sys.modules, "jax_triton", there)
    monkeypatch.delitem(sys.modules, "echo_jax.kernels.triton_call", raising=False)
    monkeypatch.setattr(jax, "__version_info__", jax_version)
    expected = contextlib.nullcontext()
    if not works:
        expected = pytest.raises(ImportError, match=rf"jax-triton {written}.*JAX 0.11")
    with expected:
        importlib.import_module("echo_jax.kernels.triton_call")
    sys.modules.pop("echo_jax.kernels.triton_call", None)


def test_importing_the_package_imports_no_kernel_language():
    check = (
        "import sys, echo_jax; found = [name for name in sys.modules if name in "
        "('triton', 'jax_triton', 'jax.experimental.pallas')]; assert not found, found"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
