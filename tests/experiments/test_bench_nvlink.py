"""The stages of a sum over the links of one host."""

import pathlib
import sys

import jax
from jax.sharding import AxisType

import echo_jax as echo

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

import bench_nvlink  # noqa: E402
from links import stages  # noqa: E402


def test_every_stage_is_timed_and_what_travels_is_counted():
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    config = echo.EchoConfig(min_bytes=0, residual_dtype="int8")
    shape = (8, 1024)
    found = stages.stage_seconds(mesh, shape, config, length=2, repetitions=1)
    assert tuple(found) == stages.STAGES
    assert min(found.values()) > 0
    sent = stages.sent_bytes(shape, 2, config)
    assert sent["psum"] == 2 * 8 * 1024
    assert sent["exchange"] == sent["gather"] == 8 * 1024 // 2 // 64 * 34


def test_a_record_says_what_the_environment_told_xla_and_nccl(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_one  --xla_two=2")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # always so here
    assert bench_nvlink.flags() == "--xla_one --xla_two=2"
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    assert bench_nvlink.flags() == "--xla_one --xla_two=2 NCCL_PROTO=Simple"
