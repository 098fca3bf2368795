"""The file of figures that a command appends to."""

import pathlib
import sys

from echo_jax.records import Record, RecordWriter


class Output(RecordWriter):
    """A writer that a full disk stops, but not the command, whose table is still due.

    Args:
      path: the JSON-lines file; None writes nothing.

    Raises:
      ValueError: if it is a folder.
      OSError: if its folder is not there and cannot be made.
    """

    def __init__(self, path: pathlib.Path | None):
        """See the class."""
        super().__init__(pathlib.Path() if path is None else path)
        self._stopped: str | None = None
        self._writes = path is not None
        if path is None:
            return
        if path.is_dir():
            raise ValueError(f"out={path} is a folder: give a file.")
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, record: Record) -> None:
        """Appends a record, unless one could not be written before."""
        if not self._writes:
            return
        try:
            super().write(record)
        except OSError as error:
            # Not every OSError has a strerror: io.UnsupportedOperation has none.
            self._writes, self._stopped = False, error.strerror or str(error)

    def close(self) -> int:
        """The exit code: 1, with a line that says so, if something is missing."""
        if self._stopped is None:
            return 0
        print(
            f"echo-jax: figures could not be written to {self.path} ({self._stopped}).",
            file=sys.stderr,
        )
        return 1
