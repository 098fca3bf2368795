import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from echo_jax import cli
from echo_jax.files import Claim

TINY = [
    *("--num-layers", "1", "--width", "32", "--num-heads", "4"),
    *("--num-kv-heads", "4", "--head-dim", "8", "--mlp-width", "32"),
    *("--batch-size", "2", "--length", "16", "--heldout-batches", "1"),
]


def run(*arguments, cwd, **kwargs):
    command = [sys.executable, "-m", "echo_jax.cli", *arguments]
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, **kwargs
    )


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    """The command sets up its devices itself, as a user's shell leaves it to."""
    for name in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)


def test_train_writes_table_picture_and_figures(tmp_path):
    done = run("train", "--steps", "2", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "held-out loss" in done.stdout
    folder = tmp_path / "runs" / "train-0"
    assert (folder / "metrics.jsonl").stat().st_size > 0
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    again = run("train", "--steps", "2", *TINY, cwd=tmp_path)
    assert again.returncode == 2
    assert "holds a run already" in again.stderr


def test_a_run_is_resumed_with_its_own_configuration(tmp_path):
    options = [*TINY, "--variants", "echo", "--checkpoint-every", "2", "--out", "r"]
    done = run("train", "--steps", "4", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = run("train", "--out", "r", "--resume", "--log-every", "3", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "goes on after step 4" in again.stdout
    other = run("train", "--out", "r", "--resume", "--bits", "3", cwd=tmp_path)
    assert other.returncode == 2
    assert "format.bits was 4, is 3" in other.stderr
    assert "Traceback" not in other.stderr
    elsewhere = pathlib.Path(__file__)
    other = run("train", "--out", "r", "--resume", "--data", elsewhere, cwd=tmp_path)
    assert other.returncode == 2
    assert "the text is another one" in other.stderr
    saved = json.loads((tmp_path / "r" / "config.json").read_text())
    assert saved["data"]["path"] is None  # a refused run changes nothing
    with Claim(tmp_path / "r"):
        other = run("train", "--out", "r", "--resume", cwd=tmp_path)
    assert other.returncode == 2
    assert "another process" in other.stderr
    copy = run(
        *("train", "--config", "r/config.json", "--out", "s", "--bits", "3"),
        cwd=tmp_path,
    )
    assert copy.returncode == 0, copy.stderr
    saved = json.loads((tmp_path / "s" / "config.json").read_text())
    assert saved["format"]["bits"] == 3
    assert saved["steps"] == 4


def test_prepared_text_is_trained_on(tmp_path):
    (tmp_path / "a.txt").write_text("some words of text, again and again\n" * 5000)
    done = run(
        *("prepare", "a.txt", "--out", "tokens", "--vocab-size", "270"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    (vocab_size,) = re.findall(r"--vocab-size (\d+)", done.stdout)
    options = ["train", "--data", "tokens", "--steps", "2", *TINY, "--variants", "echo"]
    wrong = run(*options, cwd=tmp_path)
    assert wrong.returncode == 2
    assert f"--vocab-size {vocab_size}" in wrong.stderr
    done = run(*options, "--vocab-size", vocab_size, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nats/token" in done.stdout


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    command = [sys.executable, "-m", "echo_jax.cli", "train", "--steps", "100000"]
    command += [*TINY, "--log-every", "1", "--checkpoint-every", "100000"]
    command += ["--device", "default", "--data-ranks", "1", "--tensor-ranks", "1"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "runs" / "train-0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Stopped early" in output
    # Where it ran is no part of a run's configuration.
    assert "--out runs/train-0 --resume --device default" in output
    assert "Traceback" not in errors
    assert metrics.stat().st_size > 0
    assert (metrics.parent / "curves.png").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--data", "missing.txt"], "does not exist"),
        (["train", "--batch-size", "3"], "batch_size=3"),
        (["train", "--tensor-ranks", "8"], "num_heads=4"),
        (["train", "--tensor-ranks", "3"], "vocabulary"),
        (["train", "--dtype", "bf16"], "dtype='bf16'"),
        (["explain"], "needs a shape"),
        (["train", "--bits", "5"], "bits=5"),
        (["explain", "8", "64", "--ranks", "0"], "axis_size=0"),
        (["generate", "a", "--model", "missing"], "missing does not exist"),
        (["train", "--accumulate", "3"], "3 parts of a step"),
        (["train", "--config", "missing.json"], "missing.json cannot be read"),
        (["train", "--resume"], "--resume needs checkpoints"),
        (["train", "--steps-per-call", "3"], "must be a multiple"),
        (["prepare", "missing", "--out", "made"], "missing does not exist"),
        (["train", "--processes", "2"], "processes=2"),
        (["train", "--seed", str(1 << 32)], f"seed={1 << 32} must be"),
        (["train", "--norm-epsilon", "nan"], "norm_epsilon=nan"),
        (["train", "--backend", "triton"], "needs an NVIDIA GPU"),
        (["advise", "--share", "3"], "share=3.0 must lie in 0 to 1"),
        (["prepare", "a", "--out", "b", "--vocab-size", "999999999"], "at most"),
    ],
)
def test_a_wrong_argument_is_one_clear_line(
    arguments, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    shown = capsys.readouterr().err.splitlines()
    (line,) = (line for line in shown if line.strip())  # an empty bar may be there
    assert line.startswith("echo-jax: ")
    assert words in line
    assert not list(tmp_path.iterdir())


def test_what_the_parser_refuses_is_shown_as_it_shows_it(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--steps", "many"])
    assert "--steps" in capsys.readouterr().err


def help_texts(output: str) -> list[str]:
    """Of each option, without its default; they may begin beside its name or below."""
    texts: list[str] = []
    for line in output.splitlines():
        text = line.strip("│ ")
        if re.match(r"[│ ] --\w", line):
            texts.append(text.partition("  ")[2])
        elif texts:
            texts[-1] += f" {text}"
    return [text.partition("(default")[0].strip() for text in texts]


@pytest.mark.parametrize("command", [["train"], ["generate"], ["evaluate"], ["advise"]])
def test_every_option_has_a_help_text_of_its_own(command, capsys, monkeypatch):
    """One without a comment would be shown that of the option above it."""
    monkeypatch.setenv("COLUMNS", "90")  # wide enough for one column alone
    with pytest.raises(SystemExit):
        cli.main([*command, "--help"])
    texts = help_texts(capsys.readouterr().out)
    assert len(texts) > 10
    assert len(set(texts)) == len(texts)
    assert all(texts)


def test_explain_says_path_and_bytes(capsys):
    assert cli.main(["explain", "8", "64", "--min-bytes", "0"]) == 0
    output = capsys.readouterr().out
    assert "echo on the xla backend" in output
    assert "all_to_all 238 B" in output
    assert cli.main(["explain", "1", "4096"]) == 0
    assert capsys.readouterr().out.startswith("exact")
