"""Measures the cells of a grid that a file lacks, and appends their records."""

import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from echo_jax.models import DecoderConfig
from echo_jax.records import Record, RecordWriter
from netlab import namespaces
from netlab.cells import Known, rounds
from netlab.lab import Lab

PSUM = "lax.psum float16"  # the baseline of sums
MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Under which conditions something is measured."""

    rate: float  # Mbit/s of each link, 0 for no limit
    percent: int = 0  # of the link that others' traffic takes
    delay_ms: float = 0.0  # of a packet on its way


class Measure:
    """Times of one lab, written to one file."""

    def __init__(self, lab: Lab, out: pathlib.Path, budget: float):
        """With so many seconds for the rounds of a cell."""
        self.lab, self.budget = lab, budget
        self.writer, self.known = RecordWriter(out), Known(out)
        self._built: tuple[DecoderConfig, int] | None = None
        self._parameters = 0

    def sums(
        self, cases: list[dict], size: int, place: Place, part: str = "allreduce"
    ) -> None:
        """One sum: every case at one size; the first is the baseline.

        Args:
          cases: name, dtype and configuration of each, as the workers take them.
          size: bytes of a rank's float16 message.
          place: the conditions.
          part: of the grid.
        """
        cell = self._cell(part, place, message_bytes=size)
        if self.known.has(cell):
            return
        values = size // 2
        measure = functools.partial(
            self.lab.ask, "time_sums", cases=cases, values=values
        )
        with self._conditions(place):
            measure(rounds=1)  # compiles
            seconds = rounds(measure, self.budget)
            sent = {} if place.percent else self._count(cases, values)
        exact = statistics.median(seconds[0])
        for case, times in zip(cases, seconds, strict=True):
            config = self.lab.ask("describe", case=case, values=values) | cell
            self._write("allreduce", config, times, (PSUM, exact))
            if case["name"] in sent:
                self._write_bytes(config, sent[case["name"]])
        self._say(cell, [case["name"] for case in cases], seconds)

    def torch_sums(self, size: int, place: Place) -> None:
        """The all-reduce of PyTorch, on a lab of its processes."""
        cell = self._cell("torch", place, message_bytes=size)
        if self.known.has(cell):
            return
        dtypes = ["float16", "float32"]
        measure = functools.partial(
            self.lab.ask, "time_sums", dtypes=dtypes, values=size // 2
        )
        with self._conditions(place):
            measure(rounds=1)
            seconds = rounds(measure, self.budget)
        for dtype, times in zip(dtypes, seconds, strict=True):
            config = {**cell, "case": f"torch gloo {dtype}", "dtype": dtype}
            self._write("allreduce", config | {"values": size // 2}, times, None)
        self._say(cell, dtypes, seconds)

    def model(
        self, what: str, plans: Sequence[str], choice: dict, place: Place
    ) -> None:
        """First token or training step of a decoder, by plan; the first is exact.

        Args:
          what: "ttft", "step", or "share" for the time to first token again.
          plans: as the workers know them.
          choice: ``decoder``, ``length`` and ``echo`` (the configuration of its sums).
          place: the conditions.
        """
        cell = self._cell(what, place, length=choice["length"])
        if self.known.has(cell):
            return
        self._build(choice)
        measure = functools.partial(
            self.lab.ask,
            "time_model",
            what=what,
            plans=plans,
            echo_config=choice["echo"],
        )
        with self._conditions(place):
            measure(rounds=1)  # compiles
            seconds = rounds(measure, 4 * self.budget)
        baseline = ("exact sums in float16", statistics.median(seconds[0]))
        for plan, times in zip(plans, seconds, strict=True):
            config = {**cell, "plan": plan, "parameters": self._parameters}
            config["num_chunks"] = choice["echo"]["num_chunks"] if "echo" in plan else 1
            self._write(what, config, times, baseline)
            if plan == "compute alone":
                share = 1 - statistics.median(times) / baseline[1]
                self._record("communication_share", share, "1", config, "exact")
        self._say(cell, plans, seconds)

    def _conditions(self, place: Place):
        return self.lab.conditions(
            place.rate, percent=place.percent, delay_ms=place.delay_ms
        )

    def _cell(self, part: str, place: Place, **more) -> dict[str, Any]:
        """What tells this cell from the others."""
        return {
            "part": part,
            "network": "namespaces" if self.lab.network else "loopback",
            "processes": self.lab.processes,
            "rate_mbit": place.rate or None,
            "delay_ms": place.delay_ms,
            "background": place.percent,
            **more,
        }

    def _count(self, cases: list[dict], values: int) -> dict[str, int]:
        """Bytes that the first process's interface sends in a call of each case."""
        if self.lab.network is None:
            return {}  # all processes share one interface
        count = functools.partial(self.lab.ask, "count_bytes", values=values, calls=2)
        return {case["name"]: count(case=case) / 2 for case in cases}

    def _build(self, choice: dict) -> None:
        """The decoder, once for each."""
        wanted = (choice["decoder"], choice["length"])
        if self._built != wanted:
            self._parameters = self.lab.ask(
                "build", config=wanted[0], length=wanted[1], batch=1
            )
            self._built = wanted

    def _write(self, what: str, config: dict, seconds: list[float], baseline) -> None:
        """Median and spread; and the ratio to the baseline's median."""
        median = statistics.median(seconds)
        spread = 1e3 * (max(seconds) - min(seconds))
        config = {**config, "baseline": baseline and baseline[0]}
        config["rounds"] = len(seconds)
        config["congestion_control"] = namespaces.congestion_control()
        self._record(f"{what}_ms", 1e3 * median, "ms", config, spread=spread)
        if baseline is not None:
            ratio = baseline[1] / median
            self._record(f"{what}_speedup", ratio, "1", config, baseline[0])

    def _write_bytes(self, config: dict, sent: float) -> None:
        self._record("interface_bytes", sent, "B", config)
        ratio = sent / config["wire_bytes"]
        self._record("interface_bytes_ratio", ratio, "1", config, "wire_bytes")

    def _record(
        self,
        metric: str,
        value: float,
        unit: str,
        config: dict,
        baseline=None,
        *,
        spread: float | None = None,
    ) -> None:
        self.writer.write(
            Record(
                experiment="bench_network",
                metric=metric,
                value=value,
                unit=unit,
                spread=spread,
                baseline=baseline,
                config=config,
            )
        )

    def _say(self, cell: dict, names: Sequence[str], seconds: list) -> None:
        rate = f"{cell['rate_mbit']:g} Mbit/s" if cell["rate_mbit"] else "no limit"
        size = cell.get("message_bytes")
        parts = [f"{cell['part']}: {cell['processes']} processes", rate]
        parts += [f"background {cell['background']} %"] if cell["background"] else []
        parts += [f"{size / MIB:g} MiB"] if size else []
        exact = statistics.median(seconds[0])
        times = ", ".join(
            f"{name} {1e3 * statistics.median(t):.1f} ms "
            f"({exact / statistics.median(t):.2f}x)"
            for name, t in zip(names, seconds, strict=True)
        )
        print(f"{', '.join(parts)}: {times}", flush=True)
