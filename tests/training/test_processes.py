"""Several processes are one run: the same losses, bit for bit."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from echo_jax.records import read_records
from echo_jax.training.report import read_curves

ROOT = pathlib.Path(__file__).parents[2]
OPTIONS = [
    *("--num-layers", "1", "--width", "32", "--num-heads", "4"),
    *("--num-kv-heads", "4", "--head-dim", "8", "--mlp-width", "32"),
    *("--batch-size", "4", "--length", "16", "--heldout-batches", "2"),
    *("--variants", "echo", "--steps", "6", "--log-every", "1"),
    *("--checkpoint-every", "3"),
]


def run(folder, mesh, *extra: str, processes: int = 1) -> list[str]:
    """Runs the command in so many processes; what they wrote to stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS"):
        environment.pop(name, None)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    started = []
    for process in range(processes):
        command = [sys.executable, "-m", "echo_jax.cli", "train", *OPTIONS]
        command += [*mesh, "--out", str(folder), *extra]
        if processes > 1:
            command += ["--coordinator", f"127.0.0.1:{port}"]
            command += ["--processes", str(processes), "--process", str(process)]
        started.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    errors = [process.communicate(timeout=300)[1] for process in started]
    for process, text in zip(started, errors, strict=True):
        assert process.returncode == 0, text
    return errors


@pytest.mark.long  # tests/multiprocess has a short one
@pytest.mark.parametrize("axis", ["tensor", "data"])
def test_two_processes_compute_what_one_does(tmp_path, axis):
    """Also after going on from a checkpoint that the other number wrote."""
    sizes = {"data": 1, "tensor": 1, axis: 2}
    mesh = [f"--{name}-ranks={size}" for name, size in sizes.items()]
    run(tmp_path / "one", mesh)
    run(tmp_path / "two", mesh, processes=2)
    one, two = (tmp_path / name / "metrics.jsonl" for name in ("one", "two"))
    for metric in ("train_loss", "gradient_norm", "residual_send_rms"):
        assert read_curves(one, metric) == read_curves(two, metric)

    def heldout(path):
        found = [r for r in read_records(path) if r["metric"] == "heldout_loss"]
        return [r["value"] for r in found]

    assert heldout(one) == heldout(two)
    assert len(heldout(one)) == 1
    if axis == "data":
        run(tmp_path / "one", mesh, "--resume", processes=2)
        assert heldout(one)[1:] == heldout(two)
