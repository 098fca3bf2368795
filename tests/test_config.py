import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from echo_jax import EchoConfig, WireFormat, explain, platform


def test_defaults_are_the_recommended_ones():
    config = EchoConfig()
    assert config.format == WireFormat(bits=4, block_size=64, rotate=True)
    assert config.feedback
    assert config.residual_dtype == "bfloat16"
    assert (config.num_chunks, config.backend) == (1, "auto")


def test_config_is_frozen_hashable_and_keyword_only():
    assert hash(EchoConfig()) == hash(EchoConfig(format=WireFormat()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        EchoConfig().feedback = False
    with pytest.raises(TypeError, match="positional"):
        EchoConfig(WireFormat())


def test_another_width_changes_nothing_else():
    config = EchoConfig(min_bytes=7, format=WireFormat(block_size=32))
    wide = config.with_bits(8)
    assert wide.bits_per_value == 8 + 16 / 32
    assert wide.with_bits(4) == config
    assert config.exact().bits_per_value == 16
    with pytest.raises(ValueError, match="bits=5"):
        config.with_bits(5)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")])
def test_residual_dtype_may_be_given_as_any_dtype(dtype):
    assert EchoConfig(residual_dtype=dtype) == EchoConfig()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("field", "value", "needed"),
    [
        ("format", 4, "WireFormat"),
        ("format", "4bit", "WireFormat"),
        ("feedback", 1, "bool"),
        ("min_bytes", -1, "at least 0"),
        ("min_bytes", 1e6, "int"),
        ("min_bytes", None, "int"),
        ("min_bytes", True, "int"),
        ("min_bytes", "small", "auto"),
        ("min_bytes", np.array([1, 2]), "int"),
        ("residual_dtype", "int16", "float32"),
        ("residual_dtype", "float16", "bfloat16"),
        ("residual_dtype", None, "bfloat16"),
        ("residual_dtype", "nonsense", "bfloat16"),
        ("algorithm", "three-shot", "one-shot"),
        ("algorithm", None, "two-shot"),
        ("num_chunks", 0, "at least 1"),
        ("num_chunks", 2.0, "int"),
        ("num_chunks", True, "int"),
        ("backend", "cuda", "'auto', 'xla'"),
        ("backend", None, "'auto', 'xla'"),
    ],
)
def test_refused_fields_are_named_with_what_is_accepted(field, value, needed):
    with pytest.raises(ValueError, match=f"{field}=.*{needed}"):
        EchoConfig(**{field: value})


@pytest.mark.parametrize(("on_gpu", "least"), [(False, 1 << 18), (True, 1 << 25)])
def test_auto_min_bytes_is_that_of_the_platform(on_gpu, least, monkeypatch):
    monkeypatch.setattr(platform, "expects_gpu", lambda: on_gpu)
    assert EchoConfig(min_bytes="auto").least_bytes == least
    assert EchoConfig(min_bytes=7).least_bytes == 7
    said = str(explain((least // 2 - 1,), "bfloat16", 8, EchoConfig()))
    assert said.startswith("exact")
    assert f"under min_bytes={least:,} (auto)" in said
    assert explain((least // 2,), "bfloat16", 8, EchoConfig()).path == "echo"


@pytest.mark.parametrize(
    ("plugin", "platforms", "expected"),
    [
        (True, None, True),
        (True, "cuda,cpu", True),
        (True, "gpu", True),
        (True, "cpu", False),
        (False, None, False),
        (False, "cuda", False),
    ],
)
def test_a_gpu_is_expected_where_jax_would_use_one(
    plugin, platforms, expected, monkeypatch
):
    monkeypatch.setattr(platform, "has_cuda_plugin", lambda: plugin)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        assert platform.expects_gpu() == expected
    finally:
        jax.config.update("jax_platforms", before)


def test_exact_is_exact_at_any_size_and_changes_nothing_else():
    config = EchoConfig(format=WireFormat(bits=2), min_bytes=0, num_chunks=3)
    exact = config.exact()
    assert exact.is_exact
    assert not config.is_exact
    assert dataclasses.replace(exact, path="auto") == config
    assert exact.exact() == exact
