"""Sums are checked before they are timed, and cases take turns."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import echo_jax as echo
from echo_jax import benchmark, cli
from echo_jax.benchmark import Case
from echo_jax.benchmark_model import compute_share, random_model
from echo_jax.collectives import exchange
from echo_jax.devices import Cluster, tensor_mesh
from echo_jax.models import DecoderConfig
from echo_jax.models.timing import Times
from echo_jax.records import read_records
from echo_jax.wire.format import ALLOWED_BITS
from tests.ranks import mesh

CONFIG = echo.EchoConfig(min_bytes=0)
TWO_BITS = dataclasses.replace(CONFIG, format=echo.WireFormat(bits=2))
CASES = [
    Case(name="psum"),
    Case(name="psum float32", dtype="float32"),
    Case(name="echo", config=CONFIG),
    Case(name="2 bits", config=TWO_BITS),
    Case(name="no feedback", config=dataclasses.replace(CONFIG, feedback=False)),
]
FORMATS = [
    echo.WireFormat(bits=bits, block_size=block_size, rotate=rotate)
    for bits, block_size, rotate in itertools.product(
        ALLOWED_BITS, (16, 32, 64, 128, 256), (True, False)
    )
]
FIXTURE = str(pathlib.Path(__file__).parent / "models" / "fixtures" / "llama_linear")
TINY = DecoderConfig(
    num_layers=1, width=32, num_heads=4, num_kv_heads=4, head_dim=8, mlp_width=64
)


def test_right_sums_pass_the_check():
    benchmark.check_cases(CASES, mesh(tp=4), values=1 << 14)


@pytest.mark.parametrize(("factor", "said"), [(1.5, "0.5"), (math.nan, "nan")])
def test_wrong_sums_do_not(factor, said, monkeypatch):
    def wrong(x, residual, axis_name, *, config):
        y, residual = echo.echo_psum(x, residual, axis_name, config=config)
        return y * jnp.asarray(factor, y.dtype), residual

    monkeypatch.setattr(benchmark, "echo_psum", wrong)
    with pytest.raises(RuntimeError, match=rf"echo: relative error {said}"):
        benchmark.check_cases(CASES[2:3], mesh(tp=4), values=1 << 14)


def _costly(fmt: echo.WireFormat):
    """Each compiles for seconds: that which errs most, the default, and a fine one."""
    is_edge = fmt.rotate and (fmt.bits, fmt.block_size) in ((2, 256), (4, 64), (8, 16))
    return pytest.param(fmt, marks=() if is_edge else pytest.mark.long)


@pytest.mark.parametrize("fmt", [_costly(fmt) for fmt in FORMATS], ids=str)
def test_right_sums_of_every_format_pass_on_two_ranks(fmt):
    """Also where they err nearly as much as a sum of zeros does: 2 bits."""
    case = Case(name="echo", config=dataclasses.replace(CONFIG, format=fmt))
    benchmark.check_cases([case], mesh(tp=2), values=1 << 15)


def _zeros(x):
    return jnp.zeros_like(lax.psum(x, "tp"))


def _without_half_of_the_ranks(x):
    is_summed = lax.axis_index("tp") < lax.axis_size("tp") // 2
    return x * is_summed.astype(x.dtype)


def _half_of_the_ranks(x):
    return lax.psum(_without_half_of_the_ranks(x), "tp")


@pytest.mark.parametrize("wrong", [_zeros, _half_of_the_ranks])
@pytest.mark.parametrize("algorithm", ["two-shot", "one-shot"])
def test_wrong_sums_of_no_format_pass(algorithm, wrong, monkeypatch):
    monkeypatch.setattr(
        benchmark, "echo_psum", lambda x, residual, *_, config: (wrong(x), residual)
    )
    config = dataclasses.replace(CONFIG, algorithm=algorithm)
    case = Case(name="echo", config=config)
    found = benchmark._compare(case, mesh(tp=2), (16, 1024))
    monkeypatch.setattr(benchmark, "_compare", lambda *_: found)  # compiled once
    for fmt in FORMATS:
        of_format = dataclasses.replace(config, format=fmt)
        with pytest.raises(RuntimeError, match=r"echo: (relative error|\d+ %)"):
            benchmark.check_cases([Case(name="echo", config=of_format)], mesh(tp=2))


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("block_size", [16, 256])
def test_a_rank_that_is_missing_is_found_in_two_bits(ranks, block_size, monkeypatch):
    """The roundings of a right sum can err more than what is missing here."""

    def half(x, *arguments, config):
        return echo.echo_psum(_without_half_of_the_ranks(x), *arguments, config=config)

    monkeypatch.setattr(benchmark, "echo_psum", half)
    fmt = echo.WireFormat(bits=2, block_size=block_size)
    case = Case(name="echo", config=dataclasses.replace(CONFIG, format=fmt))
    with pytest.raises(RuntimeError, match="echo: "):
        benchmark.check_cases([case], mesh(tp=ranks), values=1 << 15)


@pytest.mark.parametrize("min_bytes", [1 << 25, "auto"])
def test_the_codec_is_checked_however_small_the_message(min_bytes, monkeypatch):
    """Messages of the check are under min_bytes; those that are timed may not be."""

    def zeros(x, residual, axis_name, config, **_):
        return _zeros(x), residual

    monkeypatch.setattr(exchange, "all_reduce", zeros)
    case = Case(name="echo", config=echo.EchoConfig(min_bytes=min_bytes))
    with pytest.raises(RuntimeError, match="echo: relative error 1 "):
        benchmark.check_cases([case], mesh(tp=2), values=1 << 14)
    exact = Case(name="exact", config=echo.EchoConfig().exact())
    benchmark.check_cases([exact], mesh(tp=2), values=1 << 14)


def test_nor_do_sums_that_differ_between_ranks(monkeypatch):
    monkeypatch.setattr(benchmark, "_compare", lambda *_: (0.0, 0.0, False))
    with pytest.raises(RuntimeError, match="psum: ranks hold different sums"):
        benchmark.check_cases(CASES, mesh(tp=4))


def test_cases_take_turns(monkeypatch):
    """Every case once a round, a different one first in each."""
    order = []

    class Recorded(benchmark.TimedSum):
        def __call__(self, x):
            order.append(self.case.name)
            return super().__call__(x)

    monkeypatch.setattr(benchmark, "TimedSum", Recorded)
    cases = CASES[:3]
    times = benchmark.time_cases(cases, mesh(tp=2), (2, 64), length=2, repetitions=2)
    assert set(times) == {case.name for case in cases}
    for found in times.values():
        assert 0 < found.fastest <= found.median <= found.slowest
    names = [case.name for case in cases]
    assert order == [*names, *names[1:], names[0], names[2], *names[:2]]
    with pytest.raises(ValueError, match="length=0"):
        benchmark.time_cases(cases, mesh(tp=2), (2, 64), length=0)


def test_a_chain_hands_on_what_is_owed_and_neither_grows_nor_shrinks():
    shape, ranks = (4, 64), mesh(tp=4)
    timed = benchmark.TimedSum(CASES[2], ranks, shape, length=5)
    x = benchmark.draw_message(ranks, shape, "float16", 5)
    residual, y = timed._chain(x, timed._residual)
    assert np.any(np.asarray(residual.send, np.float32))
    # The first sum of four is twice as large as a value, the others are alike.
    assert np.std(np.asarray(y, np.float32)) == pytest.approx(2, rel=0.2)
    timed = benchmark.TimedSum(CASES[2], ranks, shape, length=5)
    assert timed(x) > 0
    assert np.any(np.asarray(timed._residual.send, np.float32))


def test_descriptions_say_what_explain_says():
    said = benchmark.describe(CASES[3], (64, 64), 4)
    assert said["path"] == "echo"
    assert said["bits"] == 2
    assert said["values"] == 4096
    assert said["wire_bytes"] == sum(echo.wire_bytes((64, 64), 4, TWO_BITS).values())
    assert benchmark.describe(CASES[1], (64, 64), 4)["message_bytes"] == 4 * 4096


def test_descriptions_tell_apart_whatever_can_be_chosen():
    """Only the path that a configuration asks for is told by the one it took."""
    changes = {
        "format": echo.WireFormat(block_size=128),
        "feedback": False,
        "min_bytes": 1,
        "residual_dtype": "int8",
        "algorithm": "one-shot",
        "num_chunks": 4,
        "backend": "xla",
    }
    assert {*changes, "path"} == {f.name for f in dataclasses.fields(CONFIG)}
    shape, plain = (64, 64), benchmark.describe(CASES[2], (64, 64), 4)
    assert {"block_size", "feedback", "min_bytes", "backend"} <= plain.keys()
    for name, value in changes.items():
        changed = dataclasses.replace(CONFIG, **{name: value})
        said = benchmark.describe(Case(name="echo", config=changed), shape, 4)
        differing = {key for key in said if said[key] != plain[key]} - {"wire_bytes"}
        assert differing == {"block_size" if name == "format" else name}


def test_records_of_the_first_token_say_how_it_was_summed(tmp_path):
    out = tmp_path / "ttft.jsonl"
    arguments = ["bench", "ttft", "--model", FIXTURE]
    arguments += ["--length", "16", "--repeats", "1", "--tensor-ranks", "2"]
    arguments += ["--min-bytes", "0", "--block-size", "32", "--no-feedback"]
    assert cli.main([*arguments, "--out", str(out)]) == 0
    configs = [record["config"] for record in read_records(out)]
    assert [config["path"] for config in configs] == ["exact", "auto", "auto"]
    for config in configs:
        assert (config["bits"], config["block_size"], config["rotate"]) == (4, 32, True)
        assert (config["min_bytes"], config["feedback"]) == (0, False)
        assert (config["backend"], config["vocab_bits"]) == ("auto", 8)
        assert config.keys() >= {"plan", "ranks", "model", "dtype", "bytes_per_token"}


def test_records_can_go_through_a_pipe():
    """A pipe can neither be read where it is written, nor sought in."""
    command = [sys.executable, "-m", "echo_jax.cli", "bench", "allreduce"]
    command += ["--device", "cpu", "--tensor-ranks", "2", "--sizes", "4096"]
    command += ["--chunks", "1", "--chain", "1", "--repeats", "1"]
    done = subprocess.run(
        [*command, "--out", "/dev/stdout"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    metrics = [json.loads(line)["metric"] for line in lines]
    assert metrics == ["allreduce_ms", "allreduce_speedup"] * 2


def test_records_hold_medians_and_their_ratio():
    times, exact = Times.of([0.002, 0.001, 0.004]), Times.of([0.006])
    one, two = benchmark.sum_records("here", {"case": "a"}, times, ("b", exact))
    assert (one.metric, one.value, one.unit) == ("allreduce_ms", 2.0, "ms")
    assert one.spread == pytest.approx(3.0)
    assert (two.metric, two.value, two.baseline) == ("allreduce_speedup", 3.0, "b")


def test_a_ranks_share_of_a_decoder_has_its_part_of_the_parameters():
    whole = random_model(TINY, mesh(tp=4))
    part = random_model(compute_share(TINY, 4), mesh(tp=1))
    norms = 3 * TINY.width  # of which every rank has its own
    assert part.num_parameters - norms == (whole.num_parameters - norms) / 4


def test_bench_allreduce_prints_a_table_and_writes_lines(tmp_path, capsys):
    out = tmp_path / "lines.jsonl"
    arguments = ["bench", "allreduce", "--tensor-ranks", "2", "--sizes", "65536"]
    arguments += ["--dtype", "float32", "--chain", "1", "--repeats", "1"]
    arguments += ["--chunks", "1", "2", "--min-bytes", "0", "--out", str(out)]
    assert cli.main(arguments) == 0
    table = capsys.readouterr().out
    assert "All-reduce of float32 over 2 ranks" in table
    records = read_records(out)
    assert [r["metric"] for r in records] == ["allreduce_ms", "allreduce_speedup"] * 3
    assert [r["config"]["num_chunks"] for r in records[::2]] == [1, 1, 2]
    assert records[1]["value"] == 1.0
    assert {r["config"]["message_bytes"] for r in records} == {65536}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sizes", "0"], "sizes="),
        (["--chunks", "0"], "chunks="),
        (["--chain", "0"], "chain=0"),
        (["--processes", "2"], "go with coordinator"),
        (["--coordinator", "a:1"], "needs processes"),
        (["--tensor-ranks", "99"], "99 needs as many devices"),
        (["--sizes", str(1 << 62)], "a TiB at most"),
        (["--tensor-ranks", "1"], "1 rank has nothing to sum"),
        (["--tensor-ranks", "2", "--out", "."], "is a folder"),
        (["--tensor-ranks", "2", "--backend", "pallas"], "needs an NVIDIA GPU"),
    ],
)
def test_bench_says_clearly_what_is_wrong(arguments, words, capsys):
    try:
        code = cli.main(["bench", "allreduce", *arguments])
    except SystemExit as end:  # the parser's own way
        code = end.code
    assert code == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.usefixtures("as_shipped")
def test_a_cluster_is_whole():
    assert Cluster().coordinator is None
    assert Cluster(coordinator="auto").processes is None
    with pytest.raises(ValueError, match="from 0 to one less; got 2 and 2"):
        Cluster(coordinator="here:1", processes=2, process=2)
    Cluster().join()
    assert tensor_mesh(2).shape == {"tensor": 2}
