"""Predictions are compared with the newest line of each cell; verdicts are right."""

import dataclasses
import pathlib
import sys

import pytest

from echo_jax.records import Record, RecordWriter, read_records
from tests.cost_model.models import LAN

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "experiments"))

import check_cost_model as check

SIZES = tuple(1 << n for n in (12, 14, 16, 18, 20, 22, 24))
RATES = (None, 400.0, 200.0, 100.0)
# On the links of the measured grid.
SHAPED = dataclasses.replace(
    LAN,
    link=dataclasses.replace(LAN.link, burst_bytes=check.BUCKET_BYTES, at_once=True),
)
ECHO = {"bits": 4, "rotate": True, "residual_dtype": "bfloat16"}


def write_network(
    path: pathlib.Path, slowed=lambda config: 1.0, *, spread: float = 0.0
) -> None:
    """A grid of the times of a cost model, as ``bench_network.py`` writes one."""
    writer = RecordWriter(path)
    place = {
        "part": "allreduce",
        "network": "namespaces",
        "processes": 4,
        "background": 0,
        "delay_ms": 0.0,
        "dtype": "float16",
    }
    for size in SIZES:
        for rate in RATES:
            model = SHAPED.over(1e6 / 8 * (rate or float("inf")))
            for pieces in (None, 1, 4):
                config = {**place, "rate_mbit": rate, "message_bytes": size}
                if pieces is None:
                    seconds = model.exact_seconds(size)
                    config |= {"case": "psum float16", "path": "psum", "num_chunks": 1}
                else:
                    seconds = model.echo_seconds(size, pieces)
                    name = "echo" if pieces == 1 else "echo, 4 pieces"
                    config |= {"case": name, "path": "echo", "num_chunks": pieces}
                    config |= ECHO
                value = 1e3 * seconds * slowed(config)
                writer.write(
                    Record(
                        experiment="bench_network",
                        metric="allreduce_ms",
                        value=value,
                        unit="ms",
                        spread=spread * value,
                        config=config,
                    )
                )


def verdicts(rows) -> dict[tuple[str, str], float]:
    """The summaries of a grid."""
    return {
        (record.metric, record.config["of"]): record.value
        for record in check.judge("here", rows)
        if record.metric != "predicted_ms"
    }


def test_a_grid_of_the_models_own_times_is_predicted(tmp_path):
    write_network(tmp_path / "bench_network.jsonl")
    rows = list(check.network(tmp_path))
    assert len(rows) == 3 * len(SIZES) * len(RATES)
    fitted = {row.cell[1:] for row in rows if row.fitted}
    assert fitted == {
        (rate, size) for rate in (None, 400.0) for size in check.NETWORK_SIZES
    }
    found = verdicts(rows)
    for of in ("all", "held out"):
        assert found["median_relative_error", of] < 1e-3
    for of in ("all", "clear", "beyond spread"):
        assert found["right_winner_share", of] == 1
    assert found["worst_advised_speedup", "all"] >= 1


def test_what_was_not_foreseen_counts_against_the_model(tmp_path):
    """Echo is six times slower than predicted at the rates that were not fitted."""

    def slowed(config):
        return 6.0 if config["path"] == "echo" and config["rate_mbit"] == 100 else 1.0

    write_network(tmp_path / "bench_network.jsonl", slowed)
    found = verdicts(list(check.network(tmp_path)))
    assert found["right_winner_share", "all"] < 1
    assert found["worst_advised_speedup", "all"] < 1
    assert found["median_relative_error", "held out"] < 1e-3


def test_a_winner_within_the_spread_is_none_beyond_it(tmp_path):
    """Rounds that lie apart as far as the slowest takes tell no winner."""

    def beyond(spread):
        path = tmp_path / f"{spread}" / "bench_network.jsonl"
        write_network(path, spread=spread)
        return [
            duel.beyond_spread for duel in check.duels(list(check.network(path.parent)))
        ]

    assert all(beyond(0.0))
    assert not any(beyond(2.0))


def test_a_second_measurement_that_finds_another_winner_is_counted(tmp_path):
    """Echo of the largest size is slow the second time; once is no repetition."""
    path = tmp_path / "bench_network.jsonl"
    write_network(path)
    assert check.measured_again(path, check.is_idle) == []
    assert not list(check.repeated("bench_network", tmp_path))

    def slowed(config):
        slow = config["path"] == "echo" and config["message_bytes"] == SIZES[-1]
        return 50.0 if slow else 1.0

    write_network(path, slowed)
    same = check.measured_again(path, check.is_idle)
    assert (len(same), sum(same)) == (len(SIZES) * len(RATES), 6 * len(RATES))
    (record,) = check.repeated("bench_network", tmp_path)
    assert record.value == pytest.approx(6 / 7)
    assert record.config["count"] == len(same)


def test_a_grid_that_is_not_whole_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check, "NETWORK_SIZES", SIZES[:1])
    write_network(tmp_path / "bench_network.jsonl")
    assert not list(check.network(tmp_path))
    assert "4 processes: 1 sizes of exact sums" in capsys.readouterr().out


def test_the_newest_line_of_a_cell_counts(tmp_path):
    path = tmp_path / "bench_network.jsonl"
    write_network(path, lambda config: 7.0)
    write_network(path)
    records = check.sums(path, lambda config: True)
    assert len(records) == 3 * len(SIZES) * len(RATES)
    exact = next(r for r in records if r["config"]["path"] == "psum")
    rate = 1e6 / 8 * (exact["config"]["rate_mbit"] or float("inf"))
    model = SHAPED.over(rate)
    size = exact["config"]["message_bytes"]
    assert exact["value"] == pytest.approx(1e3 * model.exact_seconds(size))


def test_the_script_writes_predictions_and_projections(tmp_path, monkeypatch, capsys):
    write_network(tmp_path / "bench_network.jsonl")
    out = tmp_path / "out.jsonl"
    arguments = ["check_cost_model.py", "--tiny", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--results", str(tmp_path)])
    for _ in range(2):  # the file is made anew
        check.main()
    records = read_records(out)
    assert "bench_nvlink: not measured yet." in capsys.readouterr().out
    metrics = [r["metric"] for r in records]
    assert metrics.count("predicted_ms") == 3 * len(SIZES) * len(RATES)
    assert metrics.count("projected_speedup") == 4
    assert all(r["value"] >= 1 for r in records if r["metric"] == "projected_speedup")
