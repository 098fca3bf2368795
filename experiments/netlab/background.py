"""Other people's traffic: datagrams at a steady rate between the hosts of a network.

    python background.py send ADDRESS MBIT     # until it is ended, or its input closes
    python background.py take

Every host sends to the next one, so that each link carries the same both ways. Nothing
leaves the namespaces; the links' own limits bound what is sent. Who takes the datagrams
does not read them: the kernel drops them once a small buffer is full.
"""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

PORT = 5201
_SEGMENT = 1448  # bytes of a datagram
_SEGMENTS = 10  # that are handed to the kernel at once
_UDP_SEGMENT = 103  # Linux's socket option that cuts them, absent from Python's module


@contextlib.contextmanager
def background(network, mbit: float) -> Iterator[None]:
    """So many megabits a second on every link, both ways, while the block runs."""
    from netlab.processes import end  # not needed where this file is a program

    hosts, running = range(network.hosts), []
    try:
        for host in hosts if mbit else ():
            after = network.address((host + 1) % network.hosts)
            for task in (["take"], ["send", after, str(mbit)]):
                command = [*network.command(host), sys.executable, __file__, *task]
                running.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        if running:
            time.sleep(1.0)  # until all of them send
        yield
    finally:
        end(running)


def send(address: str, mbit: float) -> None:
    """Sends for ever."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.connect((address, PORT))
        out.setsockopt(socket.SOL_UDP, _UDP_SEGMENT, _SEGMENT)
        payload = bytes(_SEGMENT * _SEGMENTS)
        interval = 8 * len(payload) / (1e6 * mbit)
        due = time.monotonic()
        while True:
            with contextlib.suppress(OSError):  # full, or nobody there yet
                out.send(payload)
            due = max(due + interval, time.monotonic() - 0.01)
            time.sleep(max(0.0, due - time.monotonic()))


def take() -> None:
    """Holds the port that datagrams come to."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
        here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        here.bind(("", PORT))
        threading.Event().wait()


def _leave_with_parent() -> None:
    sys.stdin.buffer.read()
    raise SystemExit


if __name__ == "__main__":
    _, task, *arguments = sys.argv
    work = take if task == "take" else lambda: send(arguments[0], float(arguments[1]))
    threading.Thread(target=work, daemon=True).start()
    _leave_with_parent()
