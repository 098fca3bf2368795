"""Tables of what the cost model predicts, beside what was measured, from records alone.

Every function takes the records of ``check_cost_model.jsonl`` and returns
``(head, rows)`` of strings; no rows where nothing was predicted.
"""

import math

Rows = list[tuple[str, ...]]

_GRIDS = {"bench_nvlink": "two H200s, NVLink", "bench_network": "limited links"}

# Title, script, table and words of the sections of the results page.
SECTIONS = (
    ("How far the cost model is off", "check_cost_model", "cost-accuracy",
     "Fitted to a few cells of each grid, judged on all of them; in brackets on those "
     "alone that it was not fitted to. The winner of a cell is the exact sum or the "
     "fastest of echo's cases: of all cells, of those where the medians are a tenth "
     "apart or more (*clear*), and of those where they are further apart than the mean "
     "of the two spreads, fastest to slowest round (*beyond spread*). How far a "
     "measurement settles the winner: of the cells that were measured twice, those in "
     "which the exact sum and echo in one piece came out in the same order both times "
     "(*same winner again*; a dash if none was). Last, over the cells, the least gain "
     "of the settings that `advise` gives for a link: 1 where it advises the exact "
     "sum."),
    ("Predicted sums over NVLink", "check_cost_model", "cost-nvlink",
     "Every measured case beside the cost model's time. The link is fitted to three "
     "sizes of the exact sum, each codec to the same three of its case (1, 64 and "
     "1,024 MiB)."),
    ("Predicted sums over a slow network", "check_cost_model", "cost-network",
     "Measured and predicted milliseconds of the exact float16 sum and of echo's best "
     "case. For each number of processes the model is fitted to three sizes (16 KiB, "
     "1 and 16 MiB) without a limit and at 400 Mbit/s; everything else follows from "
     "the nominal rates, and from the token bucket of the links, 256 kB that pass at "
     "once, which is known and not fitted. A sum is taken to find the bucket full: on "
     "slow links the sums before it have emptied it, and between two processes 64 KiB "
     "to 1 MiB at 50 and 100 Mbit/s then take up to nine times as long as predicted."),
    ("Projections", "check_cost_model", "cost-projected",
     "Not measured: how many times faster one bfloat16 sum is with the settings "
     "that `advise` gives, nodes of eight, by the bytes of a message; a dash where "
     "it advises the exact sum. *Between*: few bits between the nodes alone. Assumed: "
     "the codec's time goes with the nominal bandwidth of the memory, an NVLink "
     "reaches the same part of its nominal rate on both machines and with eight ranks "
     "as with two, pieces overlap on both as on two H200s, no switch adds up, every "
     "accelerator has a network card of the given rate, of which nine tenths are the "
     "message's, and a step between nodes takes 10 microseconds. The exact sum is "
     "scattered inside the nodes, summed between them and gathered inside, by ring or "
     "tree. Echo's exchanges are charged a step for each other rank, which is hard on "
     "it where there are many."),
)  # fmt: skip


def accuracy_table(records: list[dict]) -> tuple[tuple[str, ...], Rows]:
    """The verdicts on each grid."""
    found: dict[str, dict[tuple[str, str], dict]] = {}
    for record in records:
        config = record["config"]
        if "of" in config:
            cell = found.setdefault(config["grid"], {})
            cell[record["metric"], config["of"]] = record
    rows = [
        (
            _GRIDS.get(grid, grid),
            f"{cell['median_relative_error', 'all']['config']['count']}",
            _errors(cell),
            *(_winners(cell, of) for of in ("all", "clear", "beyond spread")),
            _counted(cell.get(("same_winner_again", "measured twice"))),
            f"{cell['worst_advised_speedup', 'all']['value']:.2f}x",
        )
        for grid, cell in found.items()
    ]
    head = (
        *("grid", "times", "median error", "winner right, all cells"),
        *("clear", "beyond spread", "same winner again", "least gain as advised"),
    )
    return head, rows


def nvlink_table(records: list[dict]) -> tuple[tuple[str, ...], Rows]:
    """Every row of ``bench_nvlink``."""
    rows = [
        (
            size_in_words(c["message_bytes"]),
            c["case"],
            f"{c['measured_ms']:.3f}",
            f"{r['value']:.3f}",
            f"{100 * (r['value'] / c['measured_ms'] - 1):+.0f} %",
            "yes" if c["fitted"] else "no",
        )
        for r, c in sorted(
            _predictions(records, "bench_nvlink"), key=lambda p: p[1]["message_bytes"]
        )
    ]
    return ("message", "case", "measured, ms", "predicted, ms", "off", "fitted"), rows


def network_table(records: list[dict]) -> tuple[tuple[str, ...], Rows]:
    """Every cell of ``bench_network``."""
    cells: dict[tuple, list[tuple[float, float, bool]]] = {}
    for record, c in _predictions(records, "bench_network"):
        cell = (c["ranks"], c["rate_mbit"] or math.inf, c["message_bytes"])
        is_exact = c["num_chunks"] is None
        cells.setdefault(cell, []).append((c["measured_ms"], record["value"], is_exact))
    rows = []
    for (ranks, rate, size), times in sorted(cells.items()):
        exact = [time for time in times if time[2]]
        echo = [time for time in times if not time[2]]
        if not exact or not echo:
            continue
        (measured, predicted, _), *_ = exact
        best, foreseen = (min(column) for column in list(zip(*echo, strict=True))[:2])
        rows.append(
            (
                f"{ranks}",
                "no limit" if rate == math.inf else f"{rate:,g} Mbit/s",
                size_in_words(size),
                f"{measured:,.1f}",
                f"{predicted:,.1f}",
                f"{best:,.1f}",
                f"{foreseen:,.1f}",
                f"{measured / best:.2f}x",
                f"{predicted / foreseen:.2f}x",
            )
        )
    head = (
        *("processes", "link", "message", "exact", "predicted"),
        *("echo", "predicted", "gain", "predicted"),
    )
    return head, rows


def projection_table(records: list[dict]) -> tuple[tuple[str, ...], Rows]:
    """Gains on machines that were not measured."""
    found: dict[tuple, dict[int, str]] = {}
    for record in records:
        c = record["config"]
        if record["metric"] == "projected_speedup":
            row = (c["machine"], c["ethernet_gbit"] or math.inf, c["ranks"])
            between = " between" if c["few_bits"] == "between" else ""
            gain = f"{record['value']:.2f}x{between}" if c["path"] == "echo" else "-"
            found.setdefault(row, {})[c["message_bytes"]] = gain
    sizes = sorted({size for row in found.values() for size in row})
    # One node first: it needs no Ethernet.
    ordered = sorted(found.items(), key=lambda row: (row[0][0], -row[0][1], row[0][2]))
    rows = [
        (
            machine.upper(),
            "one node" if gbit == math.inf else f"{gbit:g} Gbit/s",
            f"{ranks:,}",
            *(gains.get(size, "-") for size in sizes),
        )
        for (machine, gbit, ranks), gains in ordered
    ]
    return ("machine", "between nodes", "ranks", *map(size_in_words, sizes)), rows


def _predictions(records: list[dict], grid: str) -> list[tuple[dict, dict]]:
    return [
        (record, record["config"])
        for record in records
        if record["metric"] == "predicted_ms" and record["config"]["grid"] == grid
    ]


def _errors(cell: dict) -> str:
    """Percent over all, and in brackets over what was not fitted."""
    part = cell.get(("median_relative_error", "held out"))
    inside = f" ({100 * part['value']:.0f} %)" if part else ""
    return f"{100 * cell['median_relative_error', 'all']['value']:.0f} %{inside}"


def _winners(cell: dict, of: str) -> str:
    """How many are right."""
    return _counted(cell.get(("right_winner_share", of)))


def _counted(record: dict | None) -> str:
    """A share as a count: few cells make a percentage look finer than it is."""
    if record is None:
        return "-"
    count = record["config"]["count"]
    return f"{record['value'] * count:.0f} of {count}"


def size_in_words(size: int) -> str:
    """Of a message, in its largest whole unit."""
    return f"{size / 2**20:,g} MiB" if size >= 1 << 20 else f"{size / 1024:,g} KiB"
