"""Several processes that do the same at the same time, told so line by line.

The one who starts them writes a task as a line of JSON to the input of each; each does
it and writes a line of JSON with what came out. They end when their input does.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MARK = "netlab: "  # what a line with a result begins with; libraries write others
ROOT = pathlib.Path(__file__).parents[2]


class Team:
    """Running processes. Use :func:`team`, which ends them."""

    def __init__(self, processes: list[subprocess.Popen], errors: list):
        """Of processes whose inputs and outputs are pipes."""
        self._processes, self._errors = processes, errors

    def ask(self, task: str, *, seconds: float = 300.0, **arguments) -> list[Any]:
        """What each process answers, in order.

        Args:
          task: name of a method of the worker.
          seconds: after which all are ended: one may wait for a dead one for ever.
          arguments: of the method; what JSON can hold.

        Raises:
          RuntimeError: if one ends instead, with what it wrote last.
        """
        line = json.dumps({"task": task, **arguments}) + "\n"
        alarm = threading.Timer(seconds, self._kill)
        alarm.start()
        try:
            for process in self._processes:
                process.stdin.write(line)
                process.stdin.flush()
            return [self._answer(rank) for rank in range(len(self._processes))]
        except (BrokenPipeError, EOFError):
            late = "" if alarm.is_alive() else f" after {seconds:.0f} s"
            raise RuntimeError(f"{task} failed{late}:\n{self._last_words()}") from None
        finally:
            alarm.cancel()

    def end(self) -> None:
        """Ends all of them."""
        end(self._processes)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _answer(self, rank: int) -> Any:
        for line in self._processes[rank].stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise EOFError

    def _last_words(self) -> str:
        time.sleep(0.5)  # for the others to notice, and to say so
        self.end()
        words = []
        for rank, file in enumerate(self._errors):
            file.seek(0)
            words.append(f"process {rank}: ...{file.read()[-1500:]}")
        return "\n".join(words)


@contextlib.contextmanager
def team(
    script: pathlib.Path,
    prefixes: Sequence[Sequence[str]],
    arguments: Callable[[int], Sequence[str]],
    *,
    python: str = sys.executable,
) -> Iterator[Team]:
    """Starts a process for each prefix, and ends them with the block.

    Args:
      script: the worker.
      prefixes: what stands before each command, as ``ip netns exec NAME``.
      arguments: of the worker, by rank.
      python: interpreter that runs it.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        environment.pop(name, None)  # one device a process
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen] = []
        errors = []
        crew = Team(processes, errors)
        stack.callback(end, processes)
        for rank, prefix in enumerate(prefixes):
            errors.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            processes.append(
                subprocess.Popen(
                    [*prefix, python, str(script), *arguments(rank)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors[-1],
                    text=True,
                    env=environment,
                )
            )
        yield crew


def serve(worker: object) -> None:
    """Does what the lines of the input say, until there are no more."""
    for line in sys.stdin:
        arguments = json.loads(line)
        answer = getattr(worker, arguments.pop("task"))(**arguments)
        print(MARK + json.dumps(answer), flush=True)


def end(processes: Sequence[subprocess.Popen]) -> None:
    """Ends processes that still run, and closes their pipes."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
