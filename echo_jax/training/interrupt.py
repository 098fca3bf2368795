"""Stopping at a step's end when the user asks for it."""

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """Turns the first Ctrl-C or SIGTERM into a flag; the second raises as usual.

    Example:
        >>> with Interrupt() as interrupt:
        ...     while not interrupt.requested:
        ...         step()
    """

    def __init__(self):
        """See the class."""
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("Stopping at the end of this step.", file=sys.stderr, flush=True)
