"""Namespaces come and go; the grid is whole, and only measured where it is missing."""

import json
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))

import bench_network  # noqa: E402
import plot_bench_network  # noqa: E402
from netlab import cells, namespaces  # noqa: E402
from netlab.background import background  # noqa: E402
from netlab.processes import team  # noqa: E402

MIB = 1 << 20
REASON = namespaces.why_not()
needs_network = pytest.mark.skipif(
    REASON is not None, reason=f"no network of namespaces here: {REASON}"
)

_RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5555))
connection, _ = server.accept()
got, start = len(connection.recv(1 << 16)), time.monotonic()
while more := connection.recv(1 << 16):
    got += len(more)
print(8e-6 * got / (time.monotonic() - start))
"""
_SEND = """
import socket, sys, time
for _ in range(100):
    try:
        connection = socket.create_connection((sys.argv[1], 5555))
        break
    except OSError:
        time.sleep(0.05)
connection.sendall(bytes(int(sys.argv[2])))
"""


def flow(hosts: namespaces.Network, megabytes: float) -> float:
    """Megabits a second from the first host to the second."""
    address = hosts.address(1)
    receive = [*hosts.command(1), sys.executable, "-c", _RECEIVE, address]
    send = [*hosts.command(0), sys.executable, "-c", _SEND, address]
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
        subprocess.run([*send, str(int(1e6 * megabytes))], check=True, timeout=60)
        return float(receiver.communicate(timeout=60)[0])


def names() -> list[str]:
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    return [line for line in listed.split() if line.startswith(namespaces.PREFIX)]


@needs_network
def test_links_have_the_rate_and_traffic_takes_its_part():
    with namespaces.network(2) as hosts:
        hosts.set_rate(80.0)
        # What may pass unlimited: the buckets at both ends, and what waits in the
        # socket (128 KiB at first) until a busy machine wakes the receiver.
        unlimited = (2 * namespaces.BUCKET_BYTES + (128 << 10)) / 6e6
        assert 0.8 * 80 <= flow(hosts, 6) <= 80 / (1 - unlimited)
        hosts.set_rate(80.0, reserved=40.0)
        # What is reserved is there for all as long as nobody takes it.
        assert flow(hosts, 6) >= 0.8 * 80
        with background(hosts, 40.0):
            # A sender that is woken late leaves some of its traffic out.
            assert 0.4 * 80 <= flow(hosts, 6) <= 0.7 * 80
        hosts.set_rate(None)
        assert flow(hosts, 20) > 2 * 80
    assert not names()


@needs_network
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_an_interrupt(number, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, sys, time\n"
        # A shell that runs the tests in the background has it ignored, and Python then
        # leaves it so.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.insert(0, {str(ROOT / 'experiments')!r})\n"
        "from netlab.namespaces import network\n"
        "with network(2):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    assert len(names()) == 3
    # One at a time: a second run would remove the first one's hosts.
    assert "another run" in str(namespaces.why_not(patience=0.0))
    process.send_signal(number)
    assert process.wait(timeout=30) != 0
    process.stdout.close()
    assert not names()
    assert not list(pathlib.Path("/etc/netns").glob("echo-*"))


@needs_network
def test_what_a_killed_run_left_is_removed_by_the_next():
    subprocess.run(["ip", "netns", "add", "echo-7"], check=True)
    with namespaces.network(1):
        assert "echo-7" not in names()
    assert not names()


def test_no_network_without_root_says_why(monkeypatch):
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert namespaces.why_not() == "network namespaces need root"
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None)
    assert "ip (iproute2) is not installed" in namespaces.why_not()


def test_the_grid_covers_what_the_links_can_carry():
    settings = bench_network.Settings()
    grid = {
        (size, place.rate, place.percent)
        for _, size, place in bench_network.sums(settings, 2)
    }
    assert {size for size, rate, _ in grid if rate == 0} == set(settings.sizes)
    # The reference message at 100 Mbit/s; not 64 MiB at 50, which takes ten seconds.
    assert (16 * MIB, 100, 0) in grid
    assert (64 * MIB, 50, 0) not in grid
    assert {percent for *_, percent in grid} == {0, 25, 50, 75, 85}
    assert bench_network.seconds(16 * MIB, 100, 2) == pytest.approx(1.342, rel=1e-3)
    assert bench_network.seconds(16 * MIB, 100, 4, 50) == pytest.approx(2 * 2.013, 1e-3)
    only = bench_network.Settings(parts=("step",), backgrounds=(0, 50))
    assert not list(bench_network.sums(only, 2))
    assert [(what, place.percent) for what, _, place in bench_network.models(only)] == [
        ("step", 0),
        ("step", 50),
    ]


def test_a_cell_is_known_by_what_names_it(tmp_path):
    path = tmp_path / "lines.jsonl"
    assert not cells.Known(path).has({"processes": 2})
    path.write_text(json.dumps({"config": {"processes": 2, "values": 5}}) + "\n")
    assert cells.Known(path).has({"processes": 2})
    assert not cells.Known(path).has({"processes": 2, "values": 6})


@pytest.mark.parametrize(("budget", "wanted"), [(0.0, 3), (1.0, 5), (100.0, 401)])
def test_rounds_fit_the_budget(budget, wanted):
    """Two cases of a tenth of a second each."""
    made = []

    def measure(rounds):
        made.append(rounds)
        return [[0.1] * rounds] * 2

    seconds = cells.rounds(measure, budget)
    assert [len(times) for times in seconds] == [wanted, wanted]
    assert sum(made) == wanted


def test_a_team_tells_of_a_member_that_fails(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'experiments')!r})\n"
        "from netlab.processes import serve\n"
        "class Worker:\n"
        "    def twice(self, number):\n"
        "        return 2 * number * int(sys.argv[1])\n"
        "    def fail(self):\n"
        "        if sys.argv[1] == '1':\n"
        "            raise OSError('the cable is out')\n"
        "        import time; time.sleep(60)\n"
        "serve(Worker())\n"
    )
    with team(script, [[], []], lambda rank: [str(rank)]) as crew:
        assert crew.ask("twice", number=3) == [0, 6]
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="the cable is out"):
            crew.ask("fail", seconds=2.0)
        assert time.monotonic() - start < 30
    # It ended all of them.
    assert all(process.returncode is not None for process in crew._processes)


def test_plots_take_the_best_case_and_shade_where_it_loses(tmp_path):
    def record(metric, value, **config):
        place = {"network": "namespaces", "rate_mbit": 100, "background": 0}
        return {"metric": metric, "value": value, "config": {**place, **config}}

    sums = {"part": "allreduce", "processes": 2, "message_bytes": MIB}
    echo = sums | {"path": "echo"}
    other = echo | {"part": "algorithms"}
    records = [
        record("allreduce_speedup", 0.5, case="echo", **echo),
        record("allreduce_speedup", 2.0, case="echo, 4 pieces", **echo),
        record("allreduce_speedup", 9.0, case="psum", **(echo | {"path": "psum"})),
        record("allreduce_speedup", 9.0, case="echo, one shot", **other),
        record("ttft_speedup", 1.2, plan="echo"),
        record("ttft_speedup", 1.0, plan="exact"),
    ]
    assert plot_bench_network.sums(records) == {(2, 100, 0, MIB): 2.0}
    assert plot_bench_network.models(records, "ttft") == [(0, 1.2)]
    for lines in (records, []):
        figure = plot_bench_network.draw(lines, MIB)
        figure.savefig(tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size > 1000


def test_loopback_is_an_address_of_this_machine():
    from netlab.lab import _free_address

    host, port = _free_address().split(":")
    with socket.socket() as server:
        server.bind((host, int(port)))
