"""How long training steps take."""

import collections
import statistics
import time


class StepClock:
    """Seconds a step, without the first call, which compiles.

    Calls end in the order in which they began, and the next may begin before one has
    ended. Each counts from its :meth:`start`, or from the end of the one before it if
    that is later, to its :meth:`stop`: the device computes, and batches are read.
    Evaluation and checkpoints, during which no call runs, lie outside.
    """

    def __init__(self):
        """See the class."""
        self._calls: list[float] = []  # seconds a step of each call
        self._since_lap = 0
        self._begun: collections.deque[float] = collections.deque()
        self._ended = 0.0  # the last call

    def start(self) -> None:
        """A call begins."""
        self._begun.append(time.perf_counter())

    def stop(self, steps: int) -> None:
        """The call that began first has ended, and was of so many steps."""
        begun = max(self._begun.popleft(), self._ended)
        self._ended = time.perf_counter()
        self._calls.append((self._ended - begun) / steps)

    def lap(self) -> float | None:
        """The mean since the lap before, seconds a step; None without a call."""
        calls = self._calls[max(1, self._since_lap) :]
        self._since_lap = len(self._calls)
        return statistics.fmean(calls) if calls else None

    def median(self) -> float | None:
        """The median of all calls, seconds a step; None without a call."""
        return statistics.median(self._calls[1:]) if len(self._calls) > 1 else None
