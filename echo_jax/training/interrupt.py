"""Stopping at a step's end when the user asks for it."""

import signal
import sys
import threading
from types import FrameType, TracebackType


class Interrupt:
    """Turns the first Ctrl-C into a flag; the second raises as usual.

    Example:
        >>> with Interrupt() as interrupt:
        ...     while not interrupt.requested:
        ...         step()
    """

    def __init__(self):
        """See the class."""
        self.requested = False
        self._previous = None

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("Stopping at the end of this step.", file=sys.stderr, flush=True)
