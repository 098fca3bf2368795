"""How long training steps take."""

import collections
import queue
import statistics
import threading
import time
from concurrent.futures import Future
from typing import Any

import jax


class StepClock:
    """Seconds a step, without the first call, which compiles.

    Each call is told of by :meth:`start`, :meth:`watch` and :meth:`stop`, in this
    order. Calls end in the order in which they began, and the next may begin before one
    is stopped: it then counts from the end of that one, or else from its own start. So
    the device's work counts, and waiting for batches. Evaluation and checkpoints,
    during which no call runs, lie outside.

    A call has ended when its result is there, for which a thread waits. The caller
    would see it too late: to ask a GPU for a call of many operations takes until most
    of them are done. As a context manager the clock ends that thread.
    """

    def __init__(self):
        """See the class."""
        self._begun: collections.deque[float | None] = collections.deque()
        self._ends: collections.deque[Future[float]] = collections.deque()
        self._watched: queue.SimpleQueue = queue.SimpleQueue()
        self._ended = 0.0  # the last call
        self._calls: list[float] = []  # seconds a step of each call
        self._since_lap = 0
        # A daemon: a device that never answers must not keep the process from ending,
        # as the threads of an executor would.
        threading.Thread(
            target=_wait_for, args=(self._watched,), name="step-clock", daemon=True
        ).start()

    def start(self) -> None:
        """A call begins."""
        self._begun.append(None if self._begun else time.perf_counter())

    def watch(self, result: Any) -> None:
        """The call that began last will have ended when it has given this."""
        self._ends.append(Future())
        self._watched.put((result, self._ends[-1]))

    def stop(self, steps: int) -> None:
        """Waits for the call that began first, which was of so many steps."""
        begun, ended = self._begun.popleft(), self._ends.popleft().result()
        if not self._begun:
            ended = time.perf_counter()  # after what the caller did meanwhile
        start = self._ended if begun is None else begun
        self._calls.append((ended - start) / steps)
        self._ended = ended

    def lap(self) -> float | None:
        """The mean since the lap before, seconds a step; None without a call."""
        calls = self._calls[max(1, self._since_lap) :]
        self._since_lap = len(self._calls)
        return statistics.fmean(calls) if calls else None

    def median(self) -> float | None:
        """The median of all calls, seconds a step; None without a call."""
        return statistics.median(self._calls[1:]) if len(self._calls) > 1 else None

    def __enter__(self) -> "StepClock":
        return self

    def __exit__(self, *error) -> None:
        self._watched.put(None)


def _wait_for(watched: queue.SimpleQueue) -> None:
    """Tells each result's future when it is there, until there are no more."""
    while (entry := watched.get()) is not None:
        result, end = entry
        try:
            jax.block_until_ready(result)
        except BaseException as error:
            end.set_exception(error)
        else:
            end.set_result(time.perf_counter())
