"""One of several processes: ``python -m tests.multiprocess.worker TASK FOLDER ...``."""

import os
import pathlib
import sys
import time

import jax
import numpy as np

from tests.ranks import bits_of

HEARTBEAT_SECONDS = 10  # without a sign of life, after which the others give up


def main() -> None:
    task, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    rank, processes, port = map(int, sys.argv[3:])
    if task == "bench":
        bench(folder, rank, processes, port)
        return
    if processes > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            processes,
            rank,
            initialization_timeout=60,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    if task.startswith("results"):
        write_results(folder, int(task.split("-")[1]))
    elif task == "restore":
        from tests.multiprocess import restoring

        restoring.run_all(folder, rank)
    else:
        work_until_one_fails(task, rank, processes)


def bench(folder: pathlib.Path, rank: int, processes: int, port: int) -> None:
    """``echo-jax bench allreduce`` over all processes."""
    from echo_jax import cli

    command = ["bench", "allreduce", "--device", "cpu"]
    command += ["--coordinator", f"127.0.0.1:{port}", "--processes", str(processes)]
    command += ["--process", str(rank), "--sizes", "65536", "--min-bytes", "0"]
    command += ["--chain", "1", "--repeats", "1", "--chunks", "1"]
    sys.exit(cli.main([*command, "--out", str(folder / "bench.jsonl")]))


def write_results(folder: pathlib.Path, ranks: int) -> None:
    """The bytes of every result, in one file for each rank of this process."""
    from tests.multiprocess import cases

    results = cases.run_all(ranks)
    for place, device in enumerate(jax.devices()[:ranks]):
        if device in jax.local_devices():
            own = {name: bits_of(part(r, device)) for name, r in results.items()}
            np.savez(folder / f"{place}.npz", **own)


def part(result: jax.Array | np.ndarray, device: jax.Device) -> np.ndarray:
    """A device's own part of a stacked result; all of what is no JAX array."""
    if not isinstance(result, jax.Array):
        return result
    (own,) = [s.data for s in result.addressable_shards if s.device == device]
    return np.asarray(own)[0]


def work_until_one_fails(task: str, rank: int, processes: int) -> None:
    """Sums for ever; the task says which rank does what after the first."""
    from tests.multiprocess import cases

    fault, culprit = task.split("-")
    cases.one_sum(processes)
    if rank == int(culprit):
        print(f"fault at {time.monotonic()}", flush=True)
        if fault == "exits":
            os._exit(3)
        time.sleep(1000)
    while True:
        cases.one_sum(processes)


if __name__ == "__main__":
    main()
