"""What a results file has already, and how often a call is timed."""

import pathlib
from collections.abc import Callable

from echo_jax.records import read_records

# Sums of a few milliseconds are mostly latency, which varies by as much again: their
# medians need many rounds, which cost little.
_MOST, _FEWEST = 401, 3


class Known:
    """The cells of a results file: each is the part of a ``config`` that names it."""

    def __init__(self, path: pathlib.Path):
        """Reads the file, if there is one."""
        records = read_records(path) if path.exists() else []
        self._configs = [record["config"] for record in records]

    def has(self, cell: dict) -> bool:
        """Whether some record is of this cell."""
        return any(cell.items() <= config.items() for config in self._configs)


def rounds(
    measure: Callable[..., list[list[float]]], budget: float
) -> list[list[float]]:
    """Seconds of every case, from as many rounds as fit.

    Args:
      measure: ``(rounds=n) -> seconds`` of each case in each round.
      budget: seconds that all rounds may take; three are made in any case, 401
        at most.
    """
    seconds = measure(rounds=1)
    fit = int(budget / sum(times[0] for times in seconds))
    more = measure(rounds=min(max(fit, _FEWEST), _MOST) - 1)
    return [first + rest for first, rest in zip(seconds, more, strict=True)]
