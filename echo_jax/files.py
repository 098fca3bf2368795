"""Files that are whole or not there, and folders that one process at a time writes."""

import contextlib
import os
import pathlib
import stat
from types import TracebackType

try:
    import fcntl
except ImportError:  # not a POSIX system: folders cannot be claimed there
    fcntl = None


def write_text(path: pathlib.Path, text: str) -> None:
    """Replaces a file by one with this text, or leaves it as it was.

    A full disk or a killed process never leaves a part of the text, nor takes away what
    the file held before. Who may read and write the file stays as it was, too.

    Args:
      path: the file; a link stays one.
      text: all of it.

    Raises:
      OSError: naming the file, if it cannot be written.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():  # such as /dev/stdout
        target.write_text(text, encoding="utf-8")
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            if target.exists():  # before there is anything to read
                partial.chmod(stat.S_IMODE(target.stat().st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException as error:  # also Ctrl-C
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


class Claim:
    """A folder that this process alone writes to, until it is released or ends.

    The operating system lets go of it however the process ends. A file system without
    locks claims nothing, and nobody is refused there.

    Args:
      folder: one that exists.

    Raises:
      ValueError: if another claim holds it.
    """

    def __init__(self, folder: pathlib.Path):
        """See the class."""
        self._handle: int | None = None
        if fcntl is None:
            return
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise ValueError(
                f"{folder} is being written by another process: wait until it has "
                "ended, or choose another folder."
            ) from error
        except OSError:
            os.close(handle)
            return
        self._handle = handle

    def release(self) -> None:
        """Lets go; a second time does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __enter__(self) -> "Claim":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self):
        self.release()
