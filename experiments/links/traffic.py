"""A second process that copies between neighbouring devices all the time.

It is a process of its own, with queues of its own on every device, so that its copies
run beside whatever the first process computes: the copy engines move them, the links
and the memory are shared. The first process says what share of the links to take.

    python -m links.traffic        # reads shares from its standard input
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

_COPY_BYTES = 128 << 20  # of one copy; a third of a millisecond on NVLink
_CALIBRATION = 0.5  # seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """What the other traffic took of every link, in one direction."""

    share: float  # asked for
    bytes_per_second: float
    idle_bytes_per_second: float  # of copies without pause on links without traffic


class LinkTraffic:
    """Starts the second process; a context manager.

    Args:
      devices: how many the ring of copies has.
      platform: where they are, ``"cuda"`` or ``"cpu"``.
      copy_bytes: what is copied from each to the next at once.
    """

    def __init__(
        self, devices: int, *, platform: str = "cuda", copy_bytes: int = _COPY_BYTES
    ):
        """See the class."""
        environment = {
            **os.environ,
            "JAX_PLATFORMS": platform,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "PYTHONPATH": os.pathsep.join(
                [str(pathlib.Path(__file__).parents[1]), *sys.path]
            ),
        }
        if platform == "cpu":
            environment["XLA_FLAGS"] = (
                f"--xla_force_host_platform_device_count={devices}"
            )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "links.traffic", str(devices), str(copy_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.idle_bytes_per_second = self._answer()["bytes_per_second"]
        self._share = 0.0

    def __enter__(self) -> "LinkTraffic":
        """Itself; no share is taken yet."""
        return self

    def __exit__(self, *error) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def take(self, share: float) -> Taken:
        """Takes another share from now on; says what was taken since the last change.

        Raises:
          ValueError: for a share outside of 0 to 1.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share={share} of the links must be from 0 to 1.")
        print(share, file=self._process.stdin, flush=True)
        rate = self._answer()["bytes_per_second"]
        last, self._share = self._share, share
        return Taken(
            share=last,
            bytes_per_second=rate,
            idle_bytes_per_second=self.idle_bytes_per_second,
        )

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the process of the link traffic ended with {self._process.wait()}."
            )
        return json.loads(line)


class _Copier:
    """Copies from each device to the next, at a share of the full rate."""

    def __init__(self, devices: int, copy_bytes: int):
        import jax
        import jax.numpy as jnp

        self._jax, ring = jax, jax.devices()[:devices]
        self._pairs = [
            (jax.device_put(jnp.zeros(copy_bytes, jnp.uint8), source), target)
            for source, target in zip(ring, (*ring[1:], ring[0]), strict=True)
        ]
        self._copy_bytes = copy_bytes
        self.share, self.copies, self.full_rate = 1.0, 0, 0.0

    def _start(self) -> list:
        return [self._jax.device_put(x, target) for x, target in self._pairs]

    def run(self, seconds: float, stopped: threading.Event) -> None:
        """Copies for so long; two of each pair are in flight at full rate."""
        end, flying = time.monotonic() + seconds, []
        due = time.monotonic()
        while time.monotonic() < end and not stopped.is_set():
            share = self.share  # once: another thread changes it
            if share == 0:
                time.sleep(0.001)
                due = time.monotonic()
                continue
            flying.append(self._start())
            if share < 1:
                due += self._copy_bytes / (share * self.full_rate)
                time.sleep(max(0.0, due - time.monotonic()))
                # What could not be sent is not made up for later.
                due = max(due, time.monotonic() - 0.01)
            if len(flying) > 1:
                self._jax.block_until_ready(flying.pop(0))
                self.copies += 1
        self._jax.block_until_ready(flying)
        self.copies += len(flying)

    def take_copies(self) -> int:
        """Copies done since the last call."""
        done, self.copies = self.copies, 0
        return done


def _main(devices: int, copy_bytes: int) -> None:
    copier, stopped = _Copier(devices, copy_bytes), threading.Event()
    copier.run(_CALIBRATION / 2, stopped)
    copier.take_copies()
    start = time.monotonic()
    copier.run(_CALIBRATION, stopped)

    def answer() -> float:
        now = time.monotonic()
        rate = copier.take_copies() * copy_bytes / (now - start)
        print(json.dumps({"bytes_per_second": rate}), flush=True)
        return rate

    copier.full_rate, copier.share = answer(), 0.0
    start = time.monotonic()
    worker = threading.Thread(target=copier.run, args=(float("inf"), stopped))
    worker.start()
    for line in sys.stdin:
        if not worker.is_alive():
            sys.exit("the copies have stopped")  # its traceback is above
        answer()
        start, copier.share = time.monotonic(), float(line)
    stopped.set()
    worker.join()


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
