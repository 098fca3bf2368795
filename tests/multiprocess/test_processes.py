"""Several processes, joined by gloo over the loopback interface.

The worst of it is compiling: programs are those of every other test, built with LLVM's
optimizations off, in the processes under test and in the one they are compared with.
"""

import concurrent.futures
import re

import numpy as np
import pytest

from echo_jax.records import read_records
from tests.multiprocess.launcher import Finished, launch
from tests.multiprocess.worker import HEARTBEAT_SECONDS

WORKER = "tests.multiprocess.worker"
START_SECONDS = 240  # for several processes to start and compile on a busy machine
COLLECTIVE_SECONDS = 10  # that a sum waits for a process that is alive
SLACK_SECONDS = 10
OWN = ("owed", "psum_scatter", "gradient")  # results that differ from rank to rank


def results_of(folder, ranks: int, processes: int) -> list[dict[str, np.ndarray]]:
    """The bytes of each rank's results, computed by so many processes."""
    devices = {"JAX_NUM_CPU_DEVICES": str(ranks // processes), "NPROC": "16"}
    ended = launch(
        WORKER,
        [f"results-{ranks}", str(folder)],
        processes=processes,
        timeout=START_SECONDS,
        environment=devices if processes == 1 else None,
    )
    for process in ended:
        assert process.code == 0, process.output
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(ranks)]


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_results_are_those_of_one_process(processes, tmp_path):
    """All collectives, both directions, training, text: bit for bit on every rank.

    Of more than two processes, gloo adds the values of an exact float32 sum in another
    order than one process does: the bytes of ``flush`` are then its own.
    """
    (tmp_path / "one").mkdir()
    (tmp_path / "several").mkdir()
    wanted = results_of(tmp_path / "one", processes, 1)
    found = results_of(tmp_path / "several", processes, processes)
    for rank in range(processes):
        assert set(found[rank]) == set(wanted[rank])
        for name, value in wanted[rank].items():
            if name == "flush float32" and processes > 2:
                check_sums(found[rank][name], value, processes)
                continue
            np.testing.assert_array_equal(found[rank][name], value, err_msg=name)
            if not name.startswith(OWN):
                np.testing.assert_array_equal(value, wanted[0][name], err_msg=name)


def check_sums(found: np.ndarray, wanted: np.ndarray, terms: int) -> None:
    """Two orders of a float32 sum, of values under 8 and what is owed for one."""
    found, wanted = (np.frombuffer(v.tobytes(), np.float32) for v in (found, wanted))
    # Each of the additions rounds a partial sum under 16 a term, in either order.
    limit = 2 * (terms - 1) * 16 * terms * 2.0**-24
    np.testing.assert_allclose(found, wanted, rtol=0, atol=limit)


def test_bench_measures_over_processes_and_the_first_reports(tmp_path):
    first, second = launch(
        WORKER, ["bench", str(tmp_path)], processes=2, timeout=START_SECONDS
    )
    assert first.code == second.code == 0, first.output + second.output
    assert "over 2 ranks (2 x 1 cpu)" in first.output
    assert "All-reduce" not in second.output
    records = read_records(tmp_path / "bench.jsonl")
    assert len(records) == 4  # time and ratio, exact and echo
    for record in records:
        assert (record["config"]["processes"], record["config"]["ranks"]) == (2, 2)


@pytest.mark.long  # six seconds; what one process does is in training/test_checkpoint
def test_processes_agree_on_the_checkpoint_they_go_on_from(tmp_path):
    """What one cannot read none goes on from; one without memory stops them all."""
    ended = launch(
        WORKER,
        ["restore", str(tmp_path)],
        processes=2,
        timeout=START_SECONDS,
    )
    said = []
    for process in ended:
        assert process.code == 0, process.output
        lines = process.output.splitlines()
        said.append([line for line in lines if line.startswith("found ")])
    # Two ranks owe 16384 ones each; a mean over four adds what the summing rank owes.
    fitted = ["found fit 2 0 [32768.0]", "found fit 4 1 [40960.0]"]
    for lines in said:
        assert lines[:2] == fitted
        assert lines[3:] == ["found 2 16.0 1"]
    assert said[0][2].startswith("found RuntimeError: Another process")
    assert said[1][2] == "found MemoryError: not here"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"2", "4", "unreadable-4"}


FAULTS = {
    "exits-1": HEARTBEAT_SECONDS,
    "exits-0": HEARTBEAT_SECONDS,  # who coordinates the others
    "sleeps-1": COLLECTIVE_SECONDS + HEARTBEAT_SECONDS,
}


@pytest.fixture(scope="module")
def after_faults() -> dict[str, list[Finished]]:
    """How three pairs of processes end, one of each pair at fault."""
    waits = f"--xla_cpu_collective_timeout_seconds={COLLECTIVE_SECONDS}"

    def run(fault: str) -> list[Finished]:
        return launch(
            WORKER,
            [fault, "-"],
            processes=2,
            timeout=START_SECONDS,
            environment={"XLA_FLAGS": waits},
        )

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(FAULTS, pool.map(run, FAULTS), strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_when_one_process_fails_the_others_end_in_time(fault, after_faults):
    """With an error: no process goes on with wrong sums, and none waits for ever."""
    ended, culprit = after_faults[fault], int(fault[-1])
    begun = re.search(r"fault at ([\d.]+)", ended[culprit].output)
    assert begun, ended[culprit].output
    other = ended[1 - culprit]
    assert other.code not in (0, None), other.output
    assert other.ended - float(begun[1]) <= FAULTS[fault] + SLACK_SECONDS
    assert "rror" in other.output
