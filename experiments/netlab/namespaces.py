"""Hosts as network namespaces: veth links of a chosen rate to one switch.

Everything made here has a name that begins with ``echo-`` and is removed again: at the
end, when interrupted, and what is left over at the next start. Addresses are those set
aside for benchmarks (RFC 2544) and are known inside the namespaces alone.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

PREFIX = "echo-"
SWITCH = f"{PREFIX}switch"
SUBNET = "198.18.77"
_LOCK = pathlib.Path("/run/echo-netlab.lock")
_HOSTS = pathlib.Path("/etc/netns")
# What may pass a link at once. With less, acknowledgements wait behind the data of the
# other direction, and both run at half the rate; a message of less meets no limit.
BUCKET_BYTES = 256_000
_QUEUE_MS = 50  # that a packet waits at most, as in a router's buffer
_CONGESTION_CONTROL = "cubic"  # Linux's own default, whatever this machine has


class NoNetworkError(Exception):
    """Namespaces cannot be had here; says why."""


class Network:
    """So many hosts on a switch. Use :func:`network`, which removes it again."""

    def __init__(self, hosts: int):
        """Builds it, links unlimited."""
        self.hosts = hosts
        _run("ip", "netns", "add", SWITCH)
        _inside(SWITCH, "ip", "link", "add", "bridge", "type", "bridge")
        _inside(SWITCH, "ip", "link", "set", "bridge", "up")
        for host in range(hosts):
            self._add_host(host)

    def address(self, host: int) -> str:
        """Of a host, inside."""
        return f"{SUBNET}.{host + 1}"

    def interface(self, host: int) -> str:
        """Name of a host's end of its link."""
        return _port(host)

    def command(self, host: int) -> list[str]:
        """What starts a program on a host."""
        return ["ip", "netns", "exec", _name(host)]

    def set_rate(
        self, mbit: float | None, *, reserved: float = 0.0, delay_ms: float = 0.0
    ) -> None:
        """Limits every link, both ways; None for no limit.

        Args:
          mbit: megabits a second.
          reserved: as many of them go to datagrams first. In one queue with TCP, which
            fills it, a steady sender of datagrams would lose much of its traffic and
            not take the part of the link that it is meant to.
          delay_ms: that a packet is under way, beside the time it takes to be sent.

        Raises:
          NoNetworkError: if this kernel cannot delay packets.
        """
        for host in range(self.hosts):
            for end, delay in (
                ((_name(host), _port(host)), 0.0),
                ((SWITCH, _switch_port(host)), delay_ms),
            ):
                with contextlib.suppress(NoNetworkError):  # there may be none
                    _queue(end, "delete", "root")
                if mbit is None:
                    parent = ("root",)
                elif reserved:
                    parent = _share(end, mbit, reserved)
                else:
                    parent = _limit(end, mbit)
                if delay:
                    netem = ("netem", "delay", f"{delay}ms", "limit", "10000")
                    _queue(end, "add", *parent, *netem)

    def _add_host(self, host: int) -> None:
        name, port, other = _name(host), _port(host), _switch_port(host)
        _run("ip", "netns", "add", name)
        # gloo binds to the address of the machine's own name; this file is what
        # ip netns exec shows as /etc/hosts.
        folder = _HOSTS / name
        folder.mkdir(parents=True, exist_ok=True)
        hosts = f"127.0.0.1 localhost\n{self.address(host)} {socket.gethostname()}\n"
        (folder / "hosts").write_text(hosts)
        link = ("ip", "link", "add", port, "netns", name)
        _run(*link, "type", "veth", "peer", "name", other, "netns", SWITCH)
        _inside(name, "ip", "address", "add", f"{self.address(host)}/24", "dev", port)
        _inside(name, "ip", "link", "set", "lo", "up")
        _inside(name, "ip", "link", "set", port, "up")
        _inside(SWITCH, "ip", "link", "set", other, "master", "bridge", "up")
        control = f"net.ipv4.tcp_congestion_control={_CONGESTION_CONTROL}"
        with contextlib.suppress(NoNetworkError):
            _inside(name, "sysctl", "-qw", control)


@contextlib.contextmanager
def network(hosts: int, *, patience: float = 60.0) -> Iterator[Network]:
    """A network, removed at the end whatever happens.

    Args:
      hosts: how many it has.
      patience: seconds to wait for another run to remove its own.

    Raises:
      NoNetworkError: if it cannot be built here, or another run has one.
    """
    _check_tools()
    with _lock(patience), _signals_as_exit():
        remove_all()
        try:
            yield Network(hosts)
        finally:
            remove_all()


def why_not(*, patience: float = 60.0) -> str | None:
    """Why there can be no network here; None if there can. See :func:`network`."""
    try:
        with network(1, patience=patience) as probe:
            probe.set_rate(100.0)
    except NoNetworkError as error:
        return str(error)
    return None


def remove_all() -> None:
    """Removes every namespace of this module, with its links and hosts file."""
    listed = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=False
    )
    names = [line.split()[0] for line in listed.stdout.splitlines() if line]
    for name in names:
        if name.startswith(PREFIX):
            with contextlib.suppress(NoNetworkError):
                _run("ip", "netns", "delete", name)
    for folder in _HOSTS.glob(f"{PREFIX}*"):
        shutil.rmtree(folder, ignore_errors=True)


def congestion_control() -> str:
    """What TCP goes by on the hosts."""
    settings = pathlib.Path("/proc/sys/net/ipv4")
    known = (settings / "tcp_available_congestion_control").read_text().split()
    own = (settings / "tcp_congestion_control").read_text().strip()
    return _CONGESTION_CONTROL if _CONGESTION_CONTROL in known else own


def _name(host: int) -> str:
    return f"{PREFIX}{host}"


def _port(host: int) -> str:
    return f"{PREFIX}v{host}"


def _switch_port(host: int) -> str:
    return f"{PREFIX}s{host}"


def _limit(end: tuple[str, str], mbit: float) -> tuple[str, ...]:
    """Makes one end of a link send at a rate; where a further queue goes."""
    rate = ("rate", f"{mbit}mbit", "burst", str(BUCKET_BYTES))
    latency = ("latency", f"{_QUEUE_MS}ms")
    _queue(end, "add", "root", "handle", "1:", "tbf", *rate, *latency)
    return ("parent", "1:1")


def _share(end: tuple[str, str], mbit: float, reserved: float) -> tuple[str, ...]:
    """As :func:`_limit`, with a part of the rate for datagrams."""
    bucket = ("burst", str(BUCKET_BYTES), "cburst", str(BUCKET_BYTES))
    rest = ("rate", f"{mbit - reserved}mbit", "ceil", f"{mbit}mbit", *bucket)
    name, port = end
    _queue(end, "add", "root", "handle", "1:", "htb", "default", "20")
    for of, what in (
        (("1:", "classid", "1:1"), ("rate", f"{mbit}mbit", *bucket)),
        (("1:1", "classid", "1:10"), ("rate", f"{reserved}mbit", "prio", "0")),
        (("1:1", "classid", "1:20"), (*rest, "prio", "1")),
    ):
        _inside(name, "tc", "class", "add", "dev", port, "parent", *of, "htb", *what)
    for number, rate in ((10, reserved), (20, mbit)):
        waiting = str(int(1e3 * rate * _QUEUE_MS / 8))
        handle = ("parent", f"1:{number}", "handle", f"{number}:")
        _queue(end, "add", *handle, "bfifo", "limit", waiting)
    datagrams = ("protocol", "ip", "u32", "match", "ip", "protocol", "17", "0xff")
    where = ("parent", "1:", *datagrams, "flowid", "1:10")
    _inside(name, "tc", "filter", "add", "dev", port, *where)
    return ("parent", "20:1")


def _queue(end: tuple[str, str], verb: str, *arguments: str) -> None:
    name, port = end
    _inside(name, "tc", "qdisc", verb, "dev", port, *arguments)


def _inside(name: str, *command: str) -> None:
    _run("ip", "netns", "exec", name, *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise NoNetworkError(f"{' '.join(command)}: {said}")


def _check_tools() -> None:
    if os.geteuid():
        raise NoNetworkError("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoNetworkError(f"the command {tool} (iproute2) is not installed")


@contextlib.contextmanager
def _lock(patience: float) -> Iterator[None]:
    """One run at a time: two would remove each other's hosts."""
    until = time.monotonic() + patience
    with _LOCK.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > until:
                    raise NoNetworkError("another run has a network") from None
                time.sleep(0.1)
        yield


@contextlib.contextmanager
def _signals_as_exit() -> Iterator[None]:
    """A signal that would end the process at once lets it clean up first."""

    def leave(number, _):
        raise SystemExit(128 + number)

    before = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
