import math
import os
import signal

import pytest

from echo_jax.models import DecoderConfig
from echo_jax.records import RecordWriter, read_records
from echo_jax.training import DataConfig, TrainConfig, compare, prepare
from echo_jax.training.loop import RunResult, gap_percent
from echo_jax.training.report import plot_curves, summary_table

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
    results, stopped = compare(
        prepare(TINY),
        RecordWriter(path),
        lambda variant, step, loss: done.append((variant, step)),
    )
    assert not stopped
    assert done == [(v, s) for v in TINY.variants for s in range(1, 5)]
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

    exact, echo, _ = results
    assert value("heldout_loss", "echo") == echo.heldout_loss
    assert value("train_loss", "exact", step=4) == exact.losses[-1]
    assert value("heldout_gap_percent", "echo") == gap_percent(echo, exact)
    for op, sent in echo.bytes_per_token.items():
        assert value("bytes_per_token", "echo", collective=op) == sent


def test_ctrl_c_stops_at_the_end_of_a_step_and_keeps_what_was_measured(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def interrupt(variant, step, loss):
        if (variant, step) == ("echo", 2):
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    results, stopped = compare(prepare(TINY), RecordWriter(path), interrupt)
    assert stopped
    assert signal.getsignal(signal.SIGINT) is handler
    assert [len(r.losses) for r in results] == [4, 2]
    assert results[0].heldout_loss is not None
    assert results[1].heldout_loss is None
    assert {r["config"]["variant"] for r in read_records(path)} == {"exact", "echo"}
    plot_curves(results, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0
    assert summary_table(results, "float32").row_count > 5


def test_a_table_and_a_picture_of_nothing(tmp_path):
    results = [RunResult(variant="exact")]
    summary_table(results, "float32")
    plot_curves(results, tmp_path / "curves.png")
    assert results[0].final_loss is None
    assert gap_percent(results[0], None) is None


def test_bad_text_is_refused_before_anything_is_computed(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    config = TrainConfig(data=DataConfig(path=tmp_path / "short.txt"))
    with pytest.raises(ValueError, match="too few"):
        prepare(config)
