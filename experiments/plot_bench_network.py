"""Draws what ``bench_network.py`` measured, from its file alone.

    python experiments/plot_bench_network.py --out bench_network.svg

How much faster echo is than a float16 ``psum``: by the size of a message, by the number
of ranks, and by what others' traffic takes of the link, for sums and for a decoder.
Where it loses is shaded.
"""

import dataclasses
import pathlib
import sys

import matplotlib.pyplot as plt
import tyro

from echo_jax.records import read_records

RESULTS = pathlib.Path(__file__).parent / "results" / "bench_network.jsonl"
MIB = 1 << 20
Cells = dict[tuple, float]  # (processes, rate, background, bytes) -> best speed-up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is drawn."""

    results: pathlib.Path = RESULTS
    ranks_bytes: int = 16 * MIB  # message of the panel by ranks
    out: pathlib.Path = pathlib.Path("bench_network.svg")


def sums(records: list[dict]) -> Cells:
    """The best of echo's cases in each cell, from the newest record of each."""
    newest: dict[tuple, float] = {}
    for record in records:
        config = record["config"]
        is_sum = record["metric"] == "allreduce_speedup"
        is_sum = is_sum and config["part"] == "allreduce"
        if is_sum and config["path"] == "echo" and config["network"] == "namespaces":
            size, case = config["message_bytes"], config["case"]
            newest[(*_place(config), size, case)] = record["value"]
    best: Cells = {}
    for (*cell, _), value in newest.items():
        best[tuple(cell)] = max(value, best.get(tuple(cell), 0.0))
    return best


def models(records: list[dict], what: str) -> list[tuple[int, float]]:
    """``(percent of the link that others take, speed-up)`` of a decoder."""
    found = {
        record["config"]["background"]: record["value"]
        for record in records
        if record["metric"] == f"{what}_speedup" and record["config"]["plan"] == "echo"
    }
    return sorted(found.items())


def draw(records: list[dict], ranks_bytes: int) -> plt.Figure:
    """By size, a panel for each number of processes; by ranks; beside other traffic."""
    found = sums(records)
    processes = sorted({cell[0] for cell in found}) or [2]
    columns = max(3, len(processes))
    figure, rows = plt.subplots(
        2, columns, figsize=(4 * columns, 7.5), sharey=True, squeeze=False
    )
    for panel, count in zip(rows[0], processes, strict=False):
        _by_size(panel, found, count)
    _by_ranks(rows[1, 0], found, ranks_bytes)
    _sums_by_traffic(rows[1, 1], found, ranks_bytes)
    _models_by_traffic(rows[1, 2], records)
    for panel in rows.flat:
        if not panel.has_data():
            panel.set_axis_off()
            continue
        panel.axhspan(0, 1, color="0.9", zorder=0)
        panel.axhline(1, color="0.5", linewidth=0.8)
        panel.set_ylim(bottom=0)
        panel.text(0.98, 0.03, "echo loses", transform=panel.transAxes, ha="right")
        panel.legend(fontsize=8)
    for row in rows:
        row[0].set_ylabel("times as fast as a float16 psum")
    figure.tight_layout()
    return figure


def _by_size(panel, found: Cells, processes: int) -> None:
    for rate in _rates(found):
        line = [(c[3], v) for c, v in found.items() if c[:3] == (processes, rate, 0)]
        _line(panel, sorted(line), _rate(rate), color=_color(found, rate))
    panel.set_xscale("log", base=2)
    panel.set_xlabel("message, bytes of float16")
    panel.set_title(f"{processes} processes, idle links")


def _by_ranks(panel, found: Cells, size: int) -> None:
    for rate in _rates(found):
        line = [(c[0], v) for c, v in found.items() if c[1:] == (rate, 0, size)]
        _line(panel, sorted(line), _rate(rate), color=_color(found, rate))
    panel.set_xlabel("processes")
    panel.set_title(f"{size / MIB:g} MiB, idle links")


def _sums_by_traffic(panel, found: Cells, size: int) -> None:
    loaded = sorted({(c[0], c[1]) for c in found if c[2] and c[3] == size})
    for processes, rate in loaded:
        wanted = (processes, rate, size)
        line = [(c[2], v) for c, v in found.items() if (c[0], c[1], c[3]) == wanted]
        style = {"linestyle": {2: "-", 4: "--"}.get(processes, ":")}
        label = f"{processes} processes, {_rate(rate)}"
        _line(panel, sorted(line), label, color=_color(found, rate), **style)
    panel.set_xlabel("others' traffic, % of the link")
    panel.set_title(f"{size / MIB:g} MiB beside other traffic")


def _models_by_traffic(panel, records: list[dict]) -> None:
    for what, name in (("ttft", "first token"), ("step", "training step")):
        _line(panel, models(records, what), name)
    panel.set_xlabel("others' traffic, % of the link")
    panel.set_title("a decoder beside other traffic")


def _rates(found: Cells) -> list[float]:
    return sorted({cell[1] for cell in found})


def _color(found: Cells, rate: float) -> str:
    """The same for a rate in every panel."""
    return f"C{_rates(found).index(rate)}"


def _line(panel, points: list, label: str, **style) -> None:
    if points:
        panel.plot(*zip(*points, strict=True), marker="o", label=label, **style)


def _place(config: dict) -> tuple[int, float, int]:
    rate = config["rate_mbit"] or float("inf")
    return config["processes"], rate, config["background"]


def _rate(mbit: float) -> str:
    return "no limit" if mbit == float("inf") else f"{mbit:g} Mbit/s"


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    records = read_records(settings.results) if settings.results.exists() else []
    draw(records, settings.ranks_bytes).savefig(settings.out)


if __name__ == "__main__":
    sys.exit(main())
