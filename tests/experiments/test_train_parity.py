"""Summaries of runs that have come to different points, some of them elsewhere."""

import json
import pathlib
import sys
import types

import pytest

from echo_jax.records import Record, RecordWriter, read_records

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

import train_parity  # noqa: E402


@pytest.fixture(autouse=True)
def _corpus(monkeypatch):
    corpus = types.SimpleNamespace(vocab_size=256, checksum="this")
    manifest = types.SimpleNamespace(load=lambda _: corpus)
    monkeypatch.setattr(train_parity, "Manifest", manifest)


def write_losses(folder: pathlib.Path, losses: list[float], corpus="this", **more):
    folder.mkdir()
    content = {"corpus": corpus, "losses": {"20": losses}, **more}
    (folder / "heldout.json").write_text(json.dumps(content))


def test_a_summary_takes_runs_as_far_as_they_have_come(tmp_path):
    write_losses(tmp_path / "exact", [2.0, 2.2])
    write_losses(tmp_path / "echo", [2.1, 2.2], read_with={"exact": [2.0, 2.2]})
    ran = tmp_path / "echo" / "metrics.jsonl"
    config = {"variant": "echo", "step": 20}
    RecordWriter(ran).write(
        Record(
            experiment="t", metric="train_loss", value=2.0, unit="nats", config=config
        )
    )
    (here,) = read_records(ran)
    ran.write_text(json.dumps({**here, "device": "1 x GPU"}) + "\n")
    settings = train_parity.Settings(
        data=tmp_path, work=tmp_path, out=tmp_path / "out.jsonl"
    )
    train_parity.summarize(settings)
    found = {
        (record["config"]["variant"], record["metric"]): record
        for record in read_records(settings.out)
    }
    assert {variant for variant, _ in found} == {"exact", "echo"}
    assert found["echo", "heldout_gap_percent"]["device"] == "1 x GPU"
    assert found["echo", "heldout_gap_percent"]["value"] == pytest.approx(5 / 2.1)
    # What was learned is that of the exact run; the gap is all of reading.
    read = found["echo", "reading_gap_percent"]
    assert (read["value"], read["config"]["reading"]) == (0, "exact")
    assert found["exact", "heldout_loss"]["device"] == here["device"]
    assert {record["config"]["corpus"] for record in found.values()} == {"this"}


def test_runs_on_different_texts_are_not_compared(tmp_path):
    write_losses(tmp_path / "exact", [2.0, 2.2])
    write_losses(tmp_path / "echo", [2.1, 2.2], corpus="that")
    settings = train_parity.Settings(
        data=tmp_path, work=tmp_path, out=tmp_path / "out.jsonl"
    )
    with pytest.raises(SystemExit, match="another text"):
        train_parity.summarize(settings)
