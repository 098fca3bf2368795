"""Starts several processes of one program, as a cluster would, and waits for all."""

import contextlib
import dataclasses
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[2]
# What this process was told about its own devices; the others have one each.
_DEVICE_SETTINGS = ("XLA_FLAGS", "NPROC", "JAX_NUM_CPU_DEVICES")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finished:
    """How one process ended."""

    code: int | None  # exit code, negative for a signal; None: its time was over
    ended: float  # when, by time.monotonic, which all processes share
    output: str  # of both streams


def launch(
    module: str,
    arguments: Sequence[str],
    *,
    processes: int,
    timeout: float,
    environment: Mapping[str, str] | None = None,
) -> list[Finished]:
    """Runs ``python -m module *arguments RANK PROCESSES PORT`` for every rank.

    Args:
      module: what to run.
      arguments: the same for all.
      processes: how many.
      timeout: seconds after which those that still run are killed.
      environment: variables beside those of this process.

    Returns:
      How each ended, in the order of the ranks.
    """
    port, deadline = free_port(), time.monotonic() + timeout
    settings = {k: v for k, v in os.environ.items() if k not in _DEVICE_SETTINGS}
    settings |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **(environment or {})}
    running: list[subprocess.Popen] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_kill, running)
        outputs = []
        for rank in range(processes):
            output = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            outputs.append(output)
            command = [sys.executable, "-m", module, *arguments]
            command += [str(number) for number in (rank, processes, port)]
            process = subprocess.Popen(
                command, cwd=ROOT, env=settings, stdout=output, stderr=output
            )
            running.append(process)
        codes, ends = _wait(running, deadline)
        return [
            Finished(code=code, ended=end, output=_whole(output))
            for code, end, output in zip(codes, ends, outputs, strict=True)
        ]


def free_port() -> int:
    """A TCP port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(
    running: list[subprocess.Popen], deadline: float
) -> tuple[list[int | None], list[float]]:
    """Exit codes and times of the ends; None and the deadline for who has none."""
    codes: list[int | None] = [None] * len(running)
    ends = [deadline] * len(running)
    while None in codes and time.monotonic() < deadline:
        for rank, process in enumerate(running):
            if codes[rank] is None and process.poll() is not None:
                codes[rank], ends[rank] = process.returncode, time.monotonic()
        time.sleep(0.05)
    return codes, ends


def _whole(output) -> str:
    output.seek(0)
    return output.read()


def _kill(running: list[subprocess.Popen]) -> None:
    for process in running:
        process.kill()  # nothing, once it has ended
        process.wait()
