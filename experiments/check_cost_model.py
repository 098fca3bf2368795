"""The cost model against measured times, and what it says of machines not measured.

A model is fitted to a few cells of each measured grid and predicts all of them:

- ``bench_nvlink``: the link from three sizes of the exact sum; the codec of each case
  from the same three sizes, with pieces where they were measured;
- ``bench_network``: for each number of processes, three sizes without a limit and at
  400 Mbit/s. The other rates are predicted from their nominal value. What the links let
  pass at once is not fitted but known: the token bucket that they were built with. So
  is that gloo's all_to_all sends to all other ranks together.
  Idle links, in namespaces; the exact sum is that of float16.

Figures over all cells have the fitted ones among them; ``held out`` has not.
The winner of a cell (size, ranks, rate) is the fastest of the measured cases, exact or
echo: of all cells, of the ``clear`` ones, where the medians are a tenth apart, and of
those ``beyond spread``, where they are further apart than the mean of the two spreads
(fastest to slowest round). How far a measurement settles the winner is shown by the
cells that were measured twice: ``same_winner_again`` is the share in which the exact
sum and echo in one piece came out in the same order. Projections for A100 and H200
nodes rest on the assumptions that ``echo_jax/cost_model/projection.py`` states. Nothing
is measured here, and the file is made anew.

    python experiments/check_cost_model.py
    python experiments/check_cost_model.py --tiny     # for CI: few projections
"""

import collections
import dataclasses
import functools
import itertools
import math
import pathlib
import re
import statistics
from collections.abc import Callable, Iterator, Sequence

import tyro
from netlab.namespaces import BUCKET_BYTES

from echo_jax import EchoConfig, WireFormat
from echo_jax.cost_model import (
    MACHINES,
    Advice,
    CostModel,
    Message,
    Sample,
    advise,
    fit,
    predict,
    project,
)
from echo_jax.cost_model.advice import MARGIN
from echo_jax.records import Record, RecordWriter, read_records

RESULTS = pathlib.Path(__file__).parent / "results"
MIB = 1 << 20
PIECES = re.compile(r", \d+ pieces$")  # ends the names of cases that are cut
NVLINK_SIZES = (MIB, 64 * MIB, 1024 * MIB)  # that are fitted
NETWORK_SIZES = (1 << 14, 1 << 20, 1 << 24)
NETWORK_RATES = (None, 400)  # Mbit/s
CLEAR = 1.1  # ratio of the measured medians from which on a winner is a clear one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is compared."""

    results: pathlib.Path = RESULTS  # folder of the measured grids
    out: pathlib.Path = RESULTS / "check_cost_model.jsonl"
    ranks: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024)  # projected
    ethernet_gbit: tuple[float, ...] = (100.0, 200.0, 400.0)
    sizes: tuple[int, ...] = tuple(MIB << n for n in (0, 2, 4, 6, 8, 10))
    tiny: bool = False  # few projections


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured time and the model's."""

    cell: tuple  # ranks, Mbit/s, bytes: what the cases compete in
    case: str
    sample: Sample
    spread: float  # seconds from the fastest to the slowest round
    fitted: bool  # whether the model has seen it
    predicted: float  # seconds
    advised: bool  # whether the settings advised for its link sum this size so

    @property
    def error(self) -> float:
        """Relative to the measured time."""
        return abs(self.predicted / self.sample.seconds - 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Duel:
    """How many times faster echo's best case is than the exact sum, in one cell."""

    measured: float
    predicted: float
    beyond_spread: bool  # whether the rounds tell the measured winner

    @property
    def right(self) -> bool:
        """Whether the model names the measured winner."""
        return (self.measured > 1) == (self.predicted > 1)


Key = Callable[[dict], bool]


def sums(path: pathlib.Path, wanted: Key) -> list[dict]:
    """The newest ``allreduce_ms`` of each cell and case that is wanted."""
    newest = {(cell_of(r), r["config"]["case"]): r for r in every_sum(path, wanted)}
    return list(newest.values())


def every_sum(path: pathlib.Path, wanted: Key) -> Iterator[dict]:
    """Each ``allreduce_ms`` that is wanted, in the order of the file."""
    for record in read_records(path) if path.exists() else []:
        if record["metric"] == "allreduce_ms" and wanted(record["config"]):
            yield record


def cell_of(record: dict) -> tuple:
    """Ranks, Mbit/s and bytes of a measured sum."""
    config = record["config"]
    ranks = config.get("processes", config.get("gpus"))
    return ranks, config.get("rate_mbit"), config["message_bytes"]


def sample(record: dict, *, rated: bool) -> Sample:
    """A record as the fit takes it; ``rated`` if the link's rate is known."""
    config = record["config"]
    rate = 1e6 / 8 * (config.get("rate_mbit") or math.inf)
    return Sample(
        message_bytes=config["message_bytes"],
        seconds=record["value"] / 1e3,
        num_chunks=None if config["path"] == "psum" else config["num_chunks"],
        bytes_per_second=rate if rated else None,
    )


def echo_config(config: dict) -> EchoConfig:
    """Of the echo calls of a record."""
    return EchoConfig(
        format=WireFormat(bits=config["bits"], rotate=config["rotate"]),
        residual_dtype=config["residual_dtype"],
        algorithm=config.get("algorithm", "two-shot"),
    )


def is_plain(config: dict) -> bool:
    """Whether a sum over NVLink ran on idle links, without flags, and no psum as echo.

    What echo leaves to psum for its size says nothing about the codec.
    """
    beside = config.get("background") or config["xla_flags"]
    return not beside and config["path"] != "exact"


def nvlink(folder: pathlib.Path) -> Iterator[Row]:
    """Rows of the sums over NVLink: one link, a codec for each case."""
    found = sums(folder / "bench_nvlink.jsonl", is_plain)
    exact = [r for r in found if r["config"]["path"] == "psum"]
    by_case = collections.defaultdict(list)
    for record in found:
        if record["config"]["path"] == "echo":
            by_case[PIECES.sub("", record["config"]["case"])].append(record)
    for number, records in enumerate(by_case.values()):
        # The exact sums belong to every case and are judged once.
        judged = records if number else exact + records
        yield from compared(
            exact + records,
            judged,
            lambda c: c["message_bytes"] in NVLINK_SIZES,
            rated=False,
        )


def is_idle(c: dict) -> bool:
    """Whether it is a sum over a limited link that carries nothing else."""
    idle = c["part"] == "allreduce" and not c["background"] and not c["delay_ms"]
    inside = c["network"] == "namespaces" and c["dtype"] == "float16"
    return idle and inside and c["path"] in ("psum", "echo")


def measured_again(path: pathlib.Path, wanted: Key) -> list[bool]:
    """Of each cell that was measured twice, whether its last two winners are the same.

    The winner is the exact sum or echo in one piece, which every run has measured.
    """
    runs = collections.defaultdict(lambda: ([], []))
    for record in every_sum(path, wanted):
        config = record["config"]
        if config["num_chunks"] == 1:
            runs[cell_of(record)][config["path"] == "echo"].append(record["value"])
    same = []
    for exact, echo in runs.values():
        if min(len(exact), len(echo)) > 1:
            same.append((exact[-1] > echo[-1]) == (exact[-2] > echo[-2]))
    return same


def network(folder: pathlib.Path) -> Iterator[Row]:
    """Rows of the sums over limited links: a model for each number of processes."""

    def is_fitted(c: dict) -> bool:
        return c["message_bytes"] in NETWORK_SIZES and c["rate_mbit"] in NETWORK_RATES

    found = sums(folder / "bench_network.jsonl", is_idle)
    for processes in sorted({r["config"]["processes"] for r in found}):
        records = [r for r in found if r["config"]["processes"] == processes]
        try:
            yield from compared(records, records, is_fitted, rated=True)
        except ValueError as error:  # the grid is not whole yet
            print(f"bench_network, {processes} processes: {error}", flush=True)


def model_of(records: Sequence[dict], *, rated: bool) -> CostModel:
    """The model fitted to records of one number of ranks and one codec."""
    first = next(r["config"] for r in records if r["config"]["path"] == "echo")
    return fit(
        [sample(r, rated=rated) for r in records],
        first.get("processes") or first["gpus"],
        dtype=first["dtype"],
        config=echo_config(first),
        burst_bytes=BUCKET_BYTES if rated else 0,
        at_once=rated,  # gloo's exchange; of two GPUs it makes no difference
    )


def compared(
    records: list[dict], judged: list[dict], is_fitted: Key, *, rated: bool
) -> Iterator[Row]:
    """Fits the model to some of the records and judges it by others."""
    model = model_of([r for r in records if is_fitted(r["config"])], rated=rated)
    advices = advice_by_rate(model, records, rated=rated)
    for record in judged:
        config, measured = record["config"], sample(record, rated=rated)
        advice = advices[config.get("rate_mbit")]
        message = Message(message_bytes=measured.message_bytes)
        pieces = advice.num_chunks if advice.takes_echo(message) else None
        yield Row(
            cell=(model.ranks, config.get("rate_mbit"), config["message_bytes"]),
            case=config["case"],
            sample=measured,
            spread=(record["spread"] or 0.0) / 1e3,
            fitted=is_fitted(config),
            predicted=predict(model, measured),
            advised=pieces == measured.num_chunks,
        )


def advice_by_rate(
    model: CostModel, records: list[dict], *, rated: bool
) -> dict[float | None, Advice]:
    """What is advised for the measured messages of each link, in measured pieces."""
    by_rate = collections.defaultdict(list)
    for record in records:
        by_rate[record["config"].get("rate_mbit")].append(sample(record, rated=rated))
    advices = {}
    for rate, found in by_rate.items():
        linked = model.over(found[0].bytes_per_second) if rated else model
        sizes = sorted({s.message_bytes for s in found})
        chunks = sorted({s.num_chunks for s in found if s.num_chunks})
        messages = [Message(message_bytes=size) for size in sizes]
        advices[rate] = advise(linked, messages, chunks=chunks)
    return advices


def judge(grid: str, rows: list[Row]) -> Iterator[Record]:
    """Every prediction, then how good they are together."""
    new = functools.partial(
        Record, experiment="check_cost_model", unit="1", baseline="measured"
    )
    for row in rows:
        ranks, rate, size = row.cell
        config = {
            "grid": grid,
            "ranks": ranks,
            "rate_mbit": rate,
            "message_bytes": size,
            "case": row.case,
            "num_chunks": row.sample.num_chunks,
            "measured_ms": 1e3 * row.sample.seconds,
            "fitted": row.fitted,
            "advised": row.advised,
        }
        milliseconds = 1e3 * row.predicted
        yield new(metric="predicted_ms", value=milliseconds, config=config, unit="ms")
    held_out = [row for row in rows if not row.fitted]
    for of, some in (("all", rows), ("held out", held_out)):
        if some:
            error = statistics.median(row.error for row in some)
            config = {"grid": grid, "of": of, "count": len(some)}
            yield new(metric="median_relative_error", value=error, config=config)
            within = statistics.fmean(row.error < MARGIN for row in some)
            yield new(metric="share_within_margin", value=within, config=config)
    found = duels(rows)
    clear = [d for d in found if not 1 / CLEAR < d.measured < CLEAR]
    beyond = [d for d in found if d.beyond_spread]
    for of, some in (("all", found), ("clear", clear), ("beyond spread", beyond)):
        if some:
            right = statistics.fmean(d.right for d in some)
            config = {"grid": grid, "of": of, "count": len(some)}
            yield new(metric="right_winner_share", value=right, config=config)
    ratios = advised_speedups(rows)
    config = {"grid": grid, "of": "all", "count": len(ratios)}
    yield new(metric="worst_advised_speedup", value=min(ratios), config=config)


def repeated(grid: str, folder: pathlib.Path) -> Iterator[Record]:
    """In how many cells a second measurement named the winner of the first."""
    if grid != "bench_network":
        return
    if same := measured_again(folder / f"{grid}.jsonl", is_idle):
        config = {"grid": grid, "of": "measured twice", "count": len(same)}
        yield Record(
            experiment="check_cost_model",
            metric="same_winner_again",
            value=statistics.fmean(same),
            unit="1",
            config=config,
            baseline="measured before",
        )


def by_cell(rows: list[Row]) -> list[tuple[Row, list[Row]]]:
    """The exact sum and echo's of each cell that has both."""
    found = collections.defaultdict(list)
    for row in rows:
        found[row.cell].append(row)
    pairs = []
    for cell in found.values():
        exact = [row for row in cell if row.sample.num_chunks is None]
        echo = [row for row in cell if row.sample.num_chunks is not None]
        if exact and echo:
            pairs.append((exact[0], echo))
    return pairs


def duels(rows: list[Row]) -> list[Duel]:
    """The exact sum against echo's best case, in each cell."""
    found = []
    for exact, echo in by_cell(rows):
        best = min(echo, key=lambda row: row.sample.seconds)
        apart = abs(exact.sample.seconds - best.sample.seconds)
        duel = Duel(
            measured=exact.sample.seconds / best.sample.seconds,
            predicted=exact.predicted / min(row.predicted for row in echo),
            beyond_spread=apart > (exact.spread + best.spread) / 2,
        )
        found.append(duel)
    return found


def advised_speedups(rows: list[Row]) -> list[float]:
    """Measured gain over the exact sum of what is advised, where it was measured."""
    return [
        exact.sample.seconds / row.sample.seconds
        for exact, echo in by_cell(rows)
        for row in (exact, *echo)
        if row.advised
    ]


def projections(settings: Settings) -> Iterator[Record]:
    """Gains of one sum on nodes of eight, by machine, card, ranks and size."""
    for machine, gbit, ranks, size in itertools.product(
        MACHINES, settings.ethernet_gbit, settings.ranks, settings.sizes
    ):
        if ranks <= 8 and gbit != settings.ethernet_gbit[0]:
            continue  # one node has no other link
        nodes = project(machine, ranks, ethernet_gbit=float(gbit))
        advice = advise(nodes, [Message(message_bytes=size)])
        exact = advice.all_exact_seconds
        config = {
            "machine": machine,
            "ranks": ranks,
            "ranks_per_node": 8,
            "ethernet_gbit": gbit if ranks > 8 else None,
            "message_bytes": size,
            "exact_ms": 1e3 * exact,
            "path": advice.path,
            "num_chunks": advice.num_chunks,
            "few_bits": nodes.placement(size, advice.num_chunks),
        }
        yield Record(
            experiment="check_cost_model",
            metric="projected_speedup",
            value=exact / advice.advised_seconds,
            unit="1",
            config=config,
            baseline="exact, projected",
        )


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        settings = dataclasses.replace(
            settings, ranks=(8, 64), ethernet_gbit=(400.0,), sizes=(64 * MIB,)
        )
    settings.out.unlink(missing_ok=True)
    writer = RecordWriter(settings.out)
    for grid, compare in (("bench_nvlink", nvlink), ("bench_network", network)):
        rows = list(compare(settings.results))
        if not rows:
            print(f"{grid}: not measured yet.", flush=True)
            continue
        for record in (*judge(grid, rows), *repeated(grid, settings.results)):
            writer.write(record)
            if record.metric != "predicted_ms":
                of, count = record.config["of"], record.config["count"]
                print(f"{grid}: {record.metric} ({of}, {count}) {record.value:.3f}")
    for record in projections(settings):
        writer.write(record)
    print(f"Figures in {settings.out}.")


if __name__ == "__main__":
    main()
