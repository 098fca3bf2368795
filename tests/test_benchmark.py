"""Sums are checked before they are timed, and cases take turns."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

import echo_jax as echo
from echo_jax import benchmark, cli
from echo_jax.benchmark import Case
from echo_jax.benchmark_model import compute_share, random_model
from echo_jax.devices import Cluster, tensor_mesh
from echo_jax.models import DecoderConfig
from echo_jax.models.timing import Times
from echo_jax.records import read_records
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


def test_nor_do_sums_that_differ_between_ranks(monkeypatch):
    monkeypatch.setattr(benchmark, "_compare", lambda *_: (0.0, False))
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
