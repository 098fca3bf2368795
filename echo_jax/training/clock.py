"""How long training steps take."""

import statistics
import time


class StepClock:
    """Seconds a step, without the first call, which compiles.

    The time from :meth:`start` to :meth:`stop`, in which the device computes and the
    next batch is read; evaluation and checkpoints lie outside.
    """

    def __init__(self):
        """See the class."""
        self._calls: list[float] = []  # seconds a step of each call
        self._since_lap = 0
        self._started = 0.0

    def start(self) -> None:
        """A call begins."""
        self._started = time.perf_counter()

    def stop(self, steps: int) -> None:
        """The call has ended, and was of so many steps."""
        self._calls.append((time.perf_counter() - self._started) / steps)

    def lap(self) -> float | None:
        """The mean since the lap before, seconds a step; None without a call."""
        calls = self._calls[max(1, self._since_lap) :]
        self._since_lap = len(self._calls)
        return statistics.fmean(calls) if calls else None

    def median(self) -> float | None:
        """The median of all calls, seconds a step; None without a call."""
        return statistics.median(self._calls[1:]) if len(self._calls) > 1 else None
