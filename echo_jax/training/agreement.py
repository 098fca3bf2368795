"""What several processes decide together: a small number from each, seen by all."""

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

_DONE, _FAILED, _FATAL = range(3)  # how work ended; the worst of all processes counts
_Result = TypeVar("_Result")


class FailedTogether(Exception):
    """Work failed in this process, whose error is the cause, or in another one."""


def largest(number: int) -> int:
    """The largest of the numbers that the processes have.

    All of them must ask, and in the same order: it waits for the last one.

    Args:
      number: this process's, of 32 bits.
    """
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def from_first(number: int) -> int:
    """The number that the first process has. All of them must ask, as above.

    Args:
      number: this process's, of 32 bits; only the first one's counts.
    """
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def together(
    work: Callable[[], _Result], *, fatal: tuple[type[Exception], ...]
) -> _Result:
    """What ``work`` returns, if it returns in every process. All of them must call.

    Args:
      work: must wait for no other process where it may fail in one alone.
      fatal: errors that are raised as they are.

    Raises:
      FailedTogether: in every process, if work failed in one of them, or more.
      RuntimeError: if another process met an error of ``fatal``.
    """
    result, failure, outcome = None, None, _DONE
    try:
        result = work()
    except fatal as error:
        failure, outcome = error, _FATAL
    except Exception as error:
        failure, outcome = error, _FAILED
    worst = largest(outcome)
    if worst == _DONE:
        return result  # pyrefly: ignore[bad-return]
    if worst == _FAILED:
        raise FailedTogether("it failed in another process") from failure
    if outcome == _FATAL and failure is not None:
        raise failure
    raise RuntimeError(
        "Another process has met an error that it cannot go on after, and says which: "
        "this one stops with it."
    ) from failure
