import dataclasses
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from echo_jax.models import Decoder, DecoderConfig
from echo_jax.records import Record, RecordWriter, read_records
from echo_jax.training import (
    DataConfig,
    StepMetrics,
    TrainConfig,
    TrainingRun,
    compare,
    flops_per_token,
    prepare,
    signal_to_quantization_db,
)
from echo_jax.training.clock import StepClock
from echo_jax.training.report import plot_curves, read_curves, summary_table
from echo_jax.training.result import RunResult, gap_percent, gap_spread_percent
from echo_jax.wire import WireFormat

TINY = TrainConfig(
    model=DecoderConfig(
        num_layers=1, width=32, num_heads=4, num_kv_heads=4, head_dim=8, mlp_width=32
    ),
    data=DataConfig(batch_size=2, length=16, heldout_batches=2),
    steps=4,
    log_every=2,
)


def test_every_figure_is_in_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    done = []
    first, second, third = TINY.variants
    assert first == "exact"  # whose turn is in the middle here
    config = dataclasses.replace(TINY, variants=(second, first, third))
    results, stopped = compare(
        prepare(config),
        RecordWriter(path),
        progress=lambda variant, step, loss: done.append((variant, step)),
    )
    assert not stopped
    assert done == [(v, s) for v in config.variants for s in range(1, 5)]
    records = read_records(path)
    keys = "experiment metric value unit spread baseline config device versions commit"
    for record in records:
        assert set(keys.split()) <= set(record)
        assert math.isfinite(record["value"])

    def value(metric, variant, **config):
        (found,) = [
            r["value"]
            for r in records
            if r["metric"] == metric
            and {"variant": variant, **config}.items() <= r["config"].items()
        ]
        return found

    echo, exact, other = results
    assert value("heldout_loss", "echo") == echo.heldout_loss
    # Each is the mean since the one before.
    late = statistics.fmean(exact.losses[2:])
    assert value("train_loss", "exact", step=4) == pytest.approx(late)
    assert read_curves(path, "train_loss")["exact"].keys() == {2, 4}
    for metric in ("tokens_per_second", "flops_per_second", "gradient_norm"):
        assert value(metric, "exact", step=4) > 0
    assert echo.tokens_per_second == pytest.approx(2 * 16 / echo.step_seconds)
    for metric in ("residual_send_rms", "residual_reduce_rms"):
        assert value(metric, "echo", step=4) > 0 == value(metric, "exact", step=4)
    # 4 bits: the error of one call, some 14 % of one sum, on a stream of several.
    assert 10 < value("signal_to_quantization_db", "echo", step=4) < 50
    assert exact.signal_db is None
    for result in (echo, other):
        gap = value("heldout_gap_percent", result.variant)
        assert gap == gap_percent(result, exact)
    for op, sent in echo.bytes_per_token.items():
        assert value("bytes_per_token", "echo", collective=op) == sent


def test_ctrl_c_stops_at_the_end_of_a_step_and_keeps_what_was_measured(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def interrupt(variant, step, loss):
        if (variant, step) == ("echo", 2):
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    results, stopped = compare(prepare(TINY), RecordWriter(path), progress=interrupt)
    assert stopped
    assert signal.getsignal(signal.SIGINT) is handler
    # The step that was running when the losses of the second came is the last one.
    assert [len(r.losses) for r in results] == [4, 3]
    last = read_curves(path, "train_loss")
    assert last["echo"] == {2: pytest.approx(statistics.fmean(results[1].losses[:2]))}
    assert results[0].heldout_loss is not None
    assert results[1].heldout_loss is None
    assert {r["config"]["variant"] for r in read_records(path)} == {"exact", "echo"}
    plot_curves(path, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0
    assert summary_table(results, "float32").row_count > 5


def test_a_table_and_a_picture_of_nothing(tmp_path):
    results = [RunResult(variant="exact")]
    summary_table(results, "float32")
    plot_curves(tmp_path / "missing.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0
    assert results[0].final_loss is None
    assert gap_percent(results[0], None) is None


def test_a_picture_of_losses_that_are_not_finite(tmp_path):
    """The file has null for them, in the exact run and in the others."""
    writer = RecordWriter(tmp_path / "metrics.jsonl")
    model = {"vocab_size": 256}
    for variant, losses in {"exact": [1.0, math.nan], "echo": [math.inf, 2.0]}.items():
        for step, loss in enumerate(losses, start=1):
            config = {"variant": variant, "step": step, "model": model}
            writer.write(
                Record(
                    experiment="train",
                    metric="train_loss",
                    value=loss,
                    unit="nats",
                    config=config,
                )
            )
    curves = read_curves(writer.path, "train_loss")
    assert math.isnan(curves["exact"][2])
    assert math.isnan(curves["echo"][1])
    assert curves["echo"][2] == 2.0
    plot_curves(writer.path, tmp_path / "curves.png")


def test_bad_text_is_refused_before_anything_is_computed(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    config = TrainConfig(data=DataConfig(path=tmp_path / "short.txt"))
    with pytest.raises(ValueError, match="too few"):
        prepare(config)


def test_held_out_losses_on_the_way_and_tensorboard(tmp_path):
    config = dataclasses.replace(
        TINY, variants=("exact",), evaluate_every=2, tensorboard=True
    )
    path = tmp_path / "metrics.jsonl"
    ((result,), _) = compare(
        prepare(config), RecordWriter(path), progress=lambda *_: None
    )
    heldout = read_curves(path, "heldout_loss")["exact"]
    assert heldout.keys() == {2, 4}
    assert heldout[4] == pytest.approx(result.heldout_loss)
    (events,) = (tmp_path / "tensorboard" / "exact").iterdir()
    assert b"heldout_loss" in events.read_bytes()
    plot_curves(path, tmp_path / "curves.png")


def test_what_was_learned_is_read_with_other_sums(tmp_path):
    """The same parameters, before any step: no variant has learned anything else."""
    runs = prepare(TINY)
    read = {}
    for variant in ("exact", "echo"):
        writer = RecordWriter(tmp_path / f"{variant}.jsonl")
        with TrainingRun(runs, variant, writer=writer) as run:
            read[variant] = {
                "itself": run.heldout_losses(),
                "exact": run.heldout_losses(TINY.plan("exact")),
                "echo": run.heldout_losses(TINY.plan("echo")),
            }
            assert run.heldout_losses() == read[variant]["itself"]
    for variant, losses in read.items():
        assert losses["itself"] == losses[variant]
        assert losses["exact"] == read["exact"]["exact"]
        assert losses["echo"] == read["echo"]["echo"] != losses["exact"]


def test_figures_of_a_run_that_diverged():
    """They are not finite, or missing; none of them ends the run."""
    exact = RunResult(variant="exact", heldout=[1.0, 3.0])
    lost = RunResult(variant="echo", heldout=[math.nan, 3.0])
    assert math.isnan(gap_percent(lost, exact))
    assert math.isnan(gap_spread_percent(lost, exact))
    assert math.isnan(lost.heldout_spread)
    assert RunResult(variant="echo").heldout_spread is None
    metrics = StepMetrics(0.0, 0.0, 1.0, 1.0, 0.0, 1)
    for stream, owed in ((0.0, 1.0), (1.0, math.inf), (math.nan, 1.0)):
        found = metrics._replace(stream=stream, residual_send=owed)
        decibels = signal_to_quantization_db(found, WireFormat(), ranks=4)
        assert decibels is None or not math.isfinite(decibels)


def test_every_skipped_step_is_counted(tmp_path):
    """Between two records too: a loss may be finite where a gradient is not."""
    config = dataclasses.replace(TINY, variants=("exact",))
    path = tmp_path / "metrics.jsonl"
    run = TrainingRun(prepare(config), "exact", writer=RecordWriter(path))
    step, seen = run.step, []

    def skipping(state, tokens):
        state, metrics = step(state, tokens)
        seen.append(1)
        return state, metrics._replace(skipped=jnp.int32(len(seen) in (1, 2, 3)))

    run.step = skipping
    run.train(lambda *_: None, lambda: False)
    run.close()
    assert read_curves(path, "skipped")["exact"] == {2: 2.0, 4: 1.0}


@pytest.mark.parametrize("processes", [1, 2])
def test_the_device_has_the_next_step_before_the_host_waits(
    tmp_path, monkeypatch, processes
):
    """But where the state itself is to be evaluated: the next step would take it.

    Nor with several processes, which agree on stopping before each step.
    """
    config = dataclasses.replace(TINY, variants=("exact",), steps=6, evaluate_every=3)
    run = TrainingRun(
        prepare(config), "exact", writer=RecordWriter(tmp_path / "m.jsonl")
    )
    step, order, metrics = run.step, [], []

    def seen(state, tokens):
        order.append(f"starts {len(metrics) + 1}")
        state, found = step(state, tokens)
        metrics.append(found)
        return state, found

    run.step = seen
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    run.train(lambda _, done, loss: order.append(f"known {done}"), lambda: False)
    run.close()
    wanted = "starts 1,starts 2,known 1,starts 3,known 2,known 3"
    wanted += ",starts 4,starts 5,known 4,starts 6,known 5,known 6"
    if processes > 1:
        wanted = ",".join(f"starts {n},known {n}" for n in range(1, 7))
    assert order == wanted.split(",")
    # Every figure is still written at its own step.
    assert run.result.losses == [float(m.loss) for m in metrics]
    norms = read_curves(tmp_path / "m.jsonl", "gradient_norm")["exact"]
    assert norms == {n: float(metrics[n - 1].grad_norm) for n in (2, 4, 6)}


def test_calls_that_overlap_are_not_counted_twice(monkeypatch):
    now = iter([0.0, 5.0, 9.0, 11.0, 20.0])
    watch = types.SimpleNamespace(perf_counter=lambda: next(now))
    monkeypatch.setattr("echo_jax.training.clock.time", watch)
    with StepClock() as clock:

        def start():
            clock.start()
            clock.watch(jnp.zeros(()))

        start()  # 0
        start()
        clock.stop(1)  # 5: the first, which compiles
        start()
        clock.stop(1)  # 9: the second, 4 after the first
        clock.stop(1)  # 20: 11 after the second
        assert clock.median() == 7.5


class _Never:
    """A result that does not come."""

    def block_until_ready(self):
        threading.Event().wait()


class _Fails:
    def block_until_ready(self):
        raise RuntimeError("the device is gone")


def test_the_error_of_a_call_is_that_of_waiting_for_it():
    with StepClock() as clock:
        clock.start()
        clock.watch(_Fails())
        with pytest.raises(RuntimeError, match="is gone"):
            clock.stop(1)


def test_a_call_that_never_ends_keeps_no_process_alive():
    script = """
from tests.training.test_loop import StepClock, _Never
with StepClock() as clock:
    clock.start()
    clock.watch(_Never())
    raise SystemExit(7)
"""
    ended = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert ended.returncode == 7


@pytest.mark.parametrize(
    ("slow", "slow_steps"),
    # The last step takes a batch that was read during the one before.
    [("asking for a step", 5), ("reading a batch", 4)],
)
def test_no_step_seems_faster_than_it_was(tmp_path, slow, slow_steps):
    """Least of all the last, after which nothing is asked for."""
    seconds = 0.2
    config = dataclasses.replace(TINY, variants=("exact",), steps=5, log_every=1)
    path = tmp_path / "metrics.jsonl"
    run = TrainingRun(prepare(config), "exact", writer=RecordWriter(path))
    step, batches = run.step, run._batches

    def asks_and_waits(state, tokens):
        time.sleep(seconds)
        return jax.block_until_ready(step(state, tokens))

    class Slowly:
        def __next__(self):
            time.sleep(seconds)
            return next(batches)

        def get_state(self):
            return batches.get_state()

    if slow == "asking for a step":
        run.step = asks_and_waits
    else:
        run._batches = Slowly()
    run.train(lambda *_: None, lambda: False)
    run.close()
    speeds = read_curves(path, "tokens_per_second")["exact"]
    tokens = config.data.batch_size * config.data.length
    found = [speed for step, speed in speeds.items() if step <= slow_steps]
    assert found
    # Half of it is for a thread that this machine lets wait.
    assert max(found) < tokens / (0.5 * seconds)


def test_the_spread_of_a_gap_is_of_pairs():
    exact = RunResult(variant="exact", heldout=[1.0, 3.0, 5.0])
    near = RunResult(variant="echo", heldout=[1.01, 3.03, 5.02])
    differences = [0.01, 0.03, 0.02]
    wanted = 100 * statistics.stdev(differences) / 3**0.5 / 3.0
    assert gap_spread_percent(near, exact) == pytest.approx(wanted)
    assert gap_percent(near, exact) == pytest.approx(100 * 0.02 / 3)
    short = RunResult(variant="echo", heldout=[1.0])
    assert gap_spread_percent(short, exact) is None


def test_operations_of_a_token_are_those_of_its_products():
    """Against what XLA counts for the forward pass of an exact model."""
    model = TINY.model
    wide = dataclasses.replace(model, num_layers=2, width=64, mlp_width=160)
    length = 32

    def forward(tokens):
        module = Decoder(wide, axis_name="tensor", rngs=nnx.Rngs(0))
        return jax.vmap(
            lambda t: module(t, plan=TINY.plan("exact"))[0],
            axis_name="tensor",
            axis_size=1,
        )(tokens[None])

    def products(tokens):
        jaxpr = jax.make_jaxpr(forward)(tokens)
        return sum(_operations(jaxpr.jaxpr))

    counted = products(jnp.zeros((1, length), jnp.int32)) / length
    assert counted == pytest.approx(flops_per_token(wide, length) / 3, rel=0.01)


def _operations(jaxpr):
    """Of each matrix product, loops as often as they run."""
    for eqn in jaxpr.eqns:
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shared = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            yield 2 * shared * math.prod(eqn.outvars[0].aval.shape)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield times * sum(_operations(inner))
