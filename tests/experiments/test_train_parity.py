"""Summaries of runs that have come to different points, some of them elsewhere."""

import itertools
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
    write_losses(tmp_path / "echo", [2.1, 2.2], read_with={"20": {"exact": [2.0, 2.2]}})
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


class FakeRun:
    """Trains at once from the checkpoint it is given; losses tell step and sums."""

    checkpoint = 0

    def __init__(self, *_, **__):
        self.steps_done = FakeRun.checkpoint
        self.result = types.SimpleNamespace(tokens_per_second=None)

    def train(self, progress, stop):
        while not stop():
            self.steps_done += 20

    def heldout_losses(self, sums="own"):
        return [f"{sums} at {self.steps_done}"]

    def close(self):
        FakeRun.checkpoint = self.steps_done


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Runs ``no-feedback`` for so many tokens, one a step; what it has found then."""
    config = types.SimpleNamespace(plan=lambda sums: sums)
    prepared = types.SimpleNamespace(config=config)
    monkeypatch.setattr(train_parity, "prepare", lambda config: prepared)
    monkeypatch.setattr(train_parity, "TrainingRun", FakeRun)
    monkeypatch.setattr(train_parity.statistics, "fmean", lambda losses: 0.0)
    monkeypatch.setattr(FakeRun, "checkpoint", 0)
    (tmp_path / "no-feedback").mkdir()

    def run(tokens: int, deadline: float = float("inf")):
        settings = train_parity.Settings(
            data=tmp_path,
            work=tmp_path,
            other_tokens=tokens,
            evaluate_tokens=20,
            batch_size=1,
            length=1,
        )
        complete = train_parity.train(settings, "no-feedback", deadline)
        return complete, train_parity.heldout(settings, "no-feedback")

    return run


def read_at(step: int) -> dict[str, list[str]]:
    return {sums: [f"{sums} at {step}"] for sums in train_parity.READING}


def test_a_run_is_read_with_other_sums_at_its_end(train):
    complete, found = train(40)
    assert complete
    assert found.by_step == {20: ["own at 20"], 40: ["own at 40"]}
    assert found.read_with == {40: read_at(40)}


def test_a_run_that_goes_on_is_read_again_at_its_new_end(train):
    train(20)
    assert train(40)[1].read_with == {20: read_at(20), 40: read_at(40)}


@pytest.mark.parametrize("checkpoint", [0, 20, 40])
def test_what_a_kill_left_out_is_read_from_the_last_step(train, tmp_path, checkpoint):
    """Its checkpoint may be older than its last loss."""
    train(40)
    path = tmp_path / "no-feedback" / "heldout.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "read_with": {}}))
    FakeRun.checkpoint = checkpoint
    complete, found = train(40)
    assert complete
    assert found.read_with == {40: read_at(40)}


def test_a_run_past_its_end_is_refused(train):
    train(40)
    with pytest.raises(SystemExit, match="at step 40, past 20"):
        train(20)


def test_nothing_is_read_after_the_time_is_over(train, monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(train_parity.time, "time", lambda: next(now))
    # Asked at the start, before each of two calls, and before each reading.
    complete, found = train(40, deadline=3)
    assert not complete
    assert found.read_with == {40: {"exact": ["exact at 40"]}}
    assert train(40)[1].read_with == {40: read_at(40)}
