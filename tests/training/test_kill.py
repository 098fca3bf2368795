"""A process that is killed at any moment goes on where it was, to the same bits."""

import pathlib
import random
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from echo_jax.training.report import read_curves

STEPS = 300
OPTIONS = [
    *("--num-layers", "1", "--width", "32", "--num-heads", "4"),
    *("--num-kv-heads", "4", "--head-dim", "8", "--mlp-width", "32"),
    *("--batch-size", "2", "--length", "16", "--heldout-batches", "1"),
    *("--data-ranks", "1", "--tensor-ranks", "2", "--variants", "echo"),
    *("--steps", str(STEPS), "--log-every", "50", "--checkpoint-every", "5"),
]


def command(folder) -> list[str]:
    return [
        *(sys.executable, "-m", "echo_jax.cli", "train", *OPTIONS),
        *("--out", str(folder), "--resume"),
    ]


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    assert jax.device_count() >= 2  # here, before the variables go
    for name in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    # Compiling is what a start spends its time on.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def final_arrays(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The last checkpoint, read by orbax alone."""
    path = (folder / "checkpoints" / "echo" / str(STEPS) / "state").absolute()
    with ocp.StandardCheckpointer() as reader:
        state = reader.restore(path)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {str(path): np.asarray(leaf) for path, leaf in leaves}


def run_whole(folder) -> None:
    done = subprocess.run(command(folder), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def newest(folder) -> int:
    """The step of the newest checkpoint."""
    names = (path.name for path in (folder / "checkpoints" / "echo").glob("*"))
    return max((int(name) for name in names if name.isdigit()), default=0)


def run_killed(folder, moments: int) -> None:
    """Kills the run at random moments, then lets it finish."""
    draw = random.Random(moments)
    for step in sorted(draw.randrange(STEPS - 50) for _ in range(moments)):
        process = subprocess.Popen(
            command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        while newest(folder) < step and process.poll() is None:
            time.sleep(0.002)
        # Anywhere in a step, or in the writing of the next checkpoint.
        time.sleep(draw.uniform(0.0, 0.1))
        process.kill()
        errors = process.communicate()[1]
        assert process.returncode == -9, errors
    run_whole(folder)


@pytest.mark.parametrize(
    "moments", [2, pytest.param(10, marks=pytest.mark.long)], ids=["two", "ten"]
)
@pytest.mark.timeout(1200)
def test_kill_9_at_random_moments_changes_no_bit(tmp_path, moments):
    run_whole(tmp_path / "whole")
    run_killed(tmp_path / "killed", moments)
    whole, killed = (final_arrays(tmp_path / name) for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    for name, array in whole.items():
        assert array.tobytes() == killed[name].tobytes(), name
    curves = [
        read_curves(tmp_path / name / "metrics.jsonl", "train_loss")["echo"]
        for name in ("whole", "killed")
    ]
    assert curves[0] == curves[1]
