"""Worker processes on the hosts of a network, or all on this machine's loopback."""

import contextlib
import dataclasses
import pathlib
import socket
import sys
from collections.abc import Iterator
from typing import Any

from netlab import namespaces
from netlab.background import background
from netlab.namespaces import Network
from netlab.processes import Team, team

_FOLDER = pathlib.Path(__file__).parent
_PORT = 12399


@dataclasses.dataclass
class Lab:
    """Processes that do the same, and the network between them."""

    processes: int
    network: Network | None  # None: the loopback interface
    crew: Team

    def ask(self, task: str, **arguments) -> Any:
        """What the first process answers, once all have."""
        return self.crew.ask(task, **arguments)[0]

    @contextlib.contextmanager
    def conditions(
        self, rate: float, *, percent: float = 0, delay_ms: float = 0.0
    ) -> Iterator[None]:
        """Links of a rate (Mbit/s, 0 for no limit), a part of it others' traffic."""
        if self.network is None:
            yield
            return
        taken = rate * percent / 100
        self.network.set_rate(rate or None, reserved=taken, delay_ms=delay_ms)
        with background(self.network, taken):
            yield


@contextlib.contextmanager
def open_lab(processes: int, *, with_network: bool, torch: str | None) -> Iterator[Lab]:
    """So many processes, each a host if there may be a network.

    Args:
      processes: how many.
      with_network: whether to build one; :func:`netlab.namespaces.why_not` knows.
      torch: an interpreter that has PyTorch, whose sums are then what is timed.
    """
    with contextlib.ExitStack() as stack:
        network = None
        if with_network:
            network = stack.enter_context(namespaces.network(processes))
        script = _FOLDER / ("torch_worker.py" if torch else "jax_worker.py")
        first = f"{network.address(0)}:{_PORT}" if network else _free_address()

        def arguments(rank: int) -> list[str]:
            interface = network.interface(rank) if network else "lo"
            return [str(rank), str(processes), first, interface]

        prefixes = [network.command(r) if network else [] for r in range(processes)]
        crew = stack.enter_context(
            team(script, prefixes, arguments, python=torch or sys.executable)
        )
        lab = Lab(processes=processes, network=network, crew=crew)
        lab.ask("hello")
        yield lab


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
