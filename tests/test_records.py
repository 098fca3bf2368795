"""Records survive what happens to their files: NaN, a full disk, a killed writer."""

import json
import math
import os

import pytest

from echo_jax.records import Record, RecordWriter, origin_of, read_records


def record(**changes) -> Record:
    fields = {"experiment": "train", "metric": "loss", "value": 1.0, "unit": "nats"}
    return Record(**{**fields, "config": {"step": 1}, **changes})


@pytest.mark.parametrize("field", ["value", "spread"])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_not_finite_is_written_as_null(tmp_path, field, number):
    path = tmp_path / "a.jsonl"
    RecordWriter(path).write(record(**{field: number}))
    (found,) = read_records(path)
    assert found[field] is None
    assert "NaN" not in path.read_text()


def test_a_line_that_was_cut_costs_itself_alone(tmp_path):
    """A process is killed, or the disk is full, in the middle of a line."""
    path = tmp_path / "a.jsonl"
    writer = RecordWriter(path)
    writer.write(record(value=1.0))
    writer.write(record(value=2.0))
    path.write_bytes(path.read_bytes()[:-20])
    writer.write(record(value=3.0))
    with pytest.warns(UserWarning, match=r"a\.jsonl, line 2"):
        values = [found["value"] for found in read_records(path)]
    assert values == [1.0, 3.0]
    assert json.loads(path.read_text().splitlines()[-1])["value"] == 3.0


def test_a_config_that_is_not_finite_is_spelled_out(tmp_path):
    """No clipping is a norm without end: one must be able to choose it."""
    path = tmp_path / "a.jsonl"
    config = {"optimizer": {"clip": math.inf}, "tried": [math.nan, 1.0]}
    RecordWriter(path).write(record(config=config))
    (found,) = read_records(path)
    assert found["config"] == {"optimizer": {"clip": "inf"}, "tried": ["nan", 1.0]}


@pytest.mark.parametrize("line", [b"\xff\x00\xfe", b"12", b"null"])
def test_a_line_that_is_no_record_costs_itself_alone(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b"\n")
    RecordWriter(path).write(record(value=3.0))
    with pytest.warns(UserWarning, match="line 1 is not a whole record"):
        assert [found["value"] for found in read_records(path)] == [3.0]


def test_records_of_a_run_elsewhere_keep_where_it_was(tmp_path):
    """A summary is often written on another machine than the one that measured."""
    run, summary = tmp_path / "run.jsonl", tmp_path / "summary.jsonl"
    RecordWriter(run).write(record())
    (elsewhere,) = read_records(run)
    run.write_text(json.dumps({**elsewhere, "device": "1 x GPU", "commit": "abc"}))
    RecordWriter(summary, origin=origin_of(run)).write(record(value=2.0))
    (found,) = read_records(summary)
    assert found["value"] == 2.0
    assert (found["device"], found["commit"]) == ("1 x GPU", "abc")
    assert found["date"] == elsewhere["date"]


def test_no_origin_in_a_file_without_records(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("")
    with pytest.raises(ValueError, match="no record"):
        origin_of(path)


def test_a_pipe_takes_records(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        writer = RecordWriter(path)
        writer.write(record(value=1.0))
        writer.write(record(value=2.0))
        lines = os.read(reader, 1 << 16).decode().splitlines()
    finally:
        os.close(reader)
    assert [json.loads(line)["value"] for line in lines] == [1.0, 2.0]
