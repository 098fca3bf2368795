"""``echo-jax evaluate``, and plans from files, in this process."""

import pytest

import echo_jax as echo
from echo_jax import cli
from echo_jax.records import read_records
from tests.evaluation.sets import make_folder
from tests.models.checkpoints import FIXTURES

pytest.importorskip("lm_eval", reason="needs the extra eval")

QWEN3 = str(FIXTURES / "qwen3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("sets"))


@pytest.fixture
def plan_file(tmp_path):
    plan = echo.DepthPlan.uniform(echo.EchoConfig(min_bytes=0)).bind(4)
    plan.save(tmp_path / "mine.json", model="tiny", axis_size=2)
    return str(tmp_path / "mine.json")


def test_evaluate_shows_scores_and_appends_them(folder, plan_file, tmp_path, capsys):
    out = tmp_path / "scores.jsonl"
    arguments = ["evaluate", "--model", QWEN3, "--data", str(folder)]
    arguments += ["--tasks", "arc_easy", "lambada", "--batch-tokens", "64"]
    arguments += ["--tensor-ranks", "2", "--plan-file", plan_file, "--out", str(out)]
    assert cli.main(arguments) == 0
    table = capsys.readouterr().out
    assert "qwen3, plan mine" in table
    # Four sums of 64 values in 4 bits and a scale, the embedding's in 8.
    assert str(4 * 34 + 66) in table
    records = read_records(out)
    assert [(r["config"]["task"], r["metric"]) for r in records] == [
        ("arc_easy", "acc"),
        ("arc_easy", "acc_norm"),
        ("lambada", "acc"),
    ]
    for record in records:
        assert record["config"]["bytes_per_token"] == 4 * 34 + 66
        assert record["config"]["bits_per_value"] == 4.25
        assert 0 <= record["value"] <= 1


def test_evaluate_on_simulated_ranks(folder, capsys):
    arguments = ["evaluate", "--model", QWEN3, "--data", str(folder), "--limit", "1"]
    arguments += ["--tasks", "lambada", "--batch-tokens", "16", "--plan", "exact"]
    assert cli.main([*arguments, "--simulate-ranks", "3"]) == 0
    assert "plan exact" in capsys.readouterr().out


def test_generate_takes_a_plan_from_a_file(plan_file, capsys):
    arguments = ["generate", "import", "--model", QWEN3, "--max-new-tokens", "2"]
    arguments += ["--plan-file", plan_file]
    assert cli.main([*arguments, "--tensor-ranks", "2"]) == 0
    # Four sums in 4 bits and one in 8; the one block of a decode step is padded to two.
    sent = 4 * 34 + 66
    errors = capsys.readouterr().err
    assert f"sent {sent} bytes for each of the 16" in errors
    assert f"and {2 * sent} for each new one" in errors
    assert cli.main([*arguments, "--tensor-ranks", "4"]) == 2
    assert "plan for axis_size=2, not 4" in capsys.readouterr().err


@pytest.mark.usefixtures("as_shipped")
def test_wrong_arguments_are_one_line(folder, tmp_path, capsys):
    arguments = ["evaluate", "--model", QWEN3, "--tasks"]
    here, config = ["--data", str(folder)], f"{QWEN3}/config.json"
    for wrong, words in (
        (here, "no sets"),
        (["trivia", *here], "'trivia' is not known"),
        (["piqa", "--data", str(tmp_path)], "does not exist: give the folder"),
        (["lambada", *here, "--limit", "0"], "limit=0"),
        (["lambada", *here, "--batch-tokens", "0"], "batch_tokens=0"),
        (["lambada", *here, "--simulate-ranks", "0"], "simulate_ranks=0"),
        (
            ["lambada", *here, "--simulate-ranks", "2", "--tensor-ranks", "2"],
            "exclude each other",
        ),
        (["lambada", *here, "--out", str(tmp_path)], "is a folder"),
        (["lambada", *here, "--plan-file", "nowhere.json"], "cannot be read (No such"),
        (["lambada", *here, "--plan-file", config], "it lacks 'calls'"),
        (["lambada", *here, "--compilation-cache", config], "is a file"),
    ):
        assert cli.main([*arguments, *wrong]) == 2
        errors = capsys.readouterr().err
        assert words in errors
        assert errors.count("\n") == 1
