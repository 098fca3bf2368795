"""Tables of measured figures, made from the JSON lines of the experiments alone.

    python docs/results.py            # brings the tables of README.md up to date
    python docs/results.py --check    # fails if they are not

A generated table stands between ``<!-- results: NAME -->`` and
``<!-- end results -->``.
A single figure in running text is followed by
``<!-- result: FILE metric=METRIC key=value ... -->``, which names its line;
``field=spread`` means the line's spread instead of its value.
"""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

import benchmark_tables
import cost_tables
import network_tables
import training_tables

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"

_BLOCK = re.compile(
    r"(<!-- results: (?P<name>[\w-]+) -->\n).*?(<!-- end results -->)", re.DOTALL
)
_MARKER = re.compile(r"<!-- result: (?P<file>\S+) (?P<keys>[^>]*?) ?-->")
_NAMES = ("variant", "plan", "case")  # keys whose values have spaces in them
_NUMBER = re.compile(r"([-+]?\d[\d,]*(?:\.\d+)?)\s*(?:%|x|points|ms|GB/s)?\**\s*$")


def read(folder: pathlib.Path, file: str) -> list[dict]:
    """The records of one file; none if it has not been measured."""
    path = folder / file
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def find(records: list[dict], **keys) -> dict | None:
    """The newest record with these values, each of the record or of its config."""
    for record in reversed(records):
        everything = {**record["config"], **record}
        if all(_same(everything.get(key), value) for key, value in keys.items()):
            return record
    return None


def figure(folder: pathlib.Path, file: str, keys: dict[str, str]) -> float | None:
    """The number that a marker's keys name; None if there is no such line."""
    keys = dict(keys)
    field = keys.pop("field", "value")
    record = find(read(folder, file), **keys)
    return None if record is None else record[field]


def _same(found, wanted) -> bool:
    return str(found).lower() == str(wanted).lower()


def markers(text: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """``(number as written, file, keys)`` of each marked figure of a text."""
    for match in _MARKER.finditer(text):
        number = _NUMBER.search(text[: match.start()])
        written = number.group(1) if number else ""
        # Spaces are written as underscores, where underscores matter as %20.
        keys = dict(pair.split("=", 1) for pair in match["keys"].split())
        keys = {
            key: value.replace("_" if key in _NAMES else "%20", " ")
            for key, value in keys.items()
        }
        yield written, match["file"], keys


def as_written(value: float, written: str) -> str:
    """The value with as many decimals, and the same kind of sign, as the text has."""
    decimals = len(written.partition(".")[2])
    sign = "+" if written.startswith("+") else ""
    text = f"{value:{sign},.{decimals}f}"
    return text if "," in written else text.replace(",", "")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    rule = ("---", *["---:"] * (len(head) - 1))
    return "\n".join(_row(*cells) for cells in (head, rule, *rows))


NOTHING = "*Not measured yet.*"
_PARITY, _NVLINK = "benchmark_parity.jsonl", "bench_nvlink.jsonl"
_NETWORK, _COST = "bench_network.jsonl", "check_cost_model.jsonl"


def depth_table(folder: pathlib.Path) -> str:
    """Relative error of the stream after 1 to 1,000 calls."""
    records = [
        r
        for r in read(folder, "error_bound.jsonl")
        if r["metric"] == "relative_rms_error" and r["config"]["sweep"] == "depth"
    ]
    if not records:
        return NOTHING
    calls = sorted({r["config"]["calls"] for r in records})
    lines = {}
    for record in records:
        config = record["config"]
        key = (config["bits"], not config["feedback"], config["residual_dtype"])
        lines.setdefault(key, {})[config["calls"]] = record["value"]
    rows = [
        (
            f"{bits} bits, "
            + ("no feedback" if plain else f"feedback, {dtype} residual"),
            *(f"{found[n]:.3f}" for n in calls),
        )
        for (bits, plain, dtype), found in sorted(lines.items())
    ]
    return _table(("after calls", *(f"{n:,}" for n in calls)), rows)


def bound_table(folder: pathlib.Path) -> str:
    """Measured maximum and both bounds against the number of ranks."""
    records = [
        r
        for r in read(folder, "error_bound.jsonl")
        if r["config"].get("sweep") == "ranks"
    ]
    if not records:
        return NOTHING
    cells: dict[int, dict[str, float]] = {}
    for record in records:
        cells.setdefault(record["config"]["ranks"], {})[record["metric"]] = record[
            "value"
        ]
    rows = [
        (
            f"{ranks}",
            *(f"{cell[m]:.2f}" for m in ("measured_error", "typical_bound", "bound")),
            f"{cell['relative_rms_error']:.4f}",
        )
        for ranks, cell in sorted(cells.items())
    ]
    head = ("ranks", "measured max", "typical bound", "worst case", "relative rms")
    return _table(head, rows)


def format_table(folder: pathlib.Path) -> str:
    """Relative error of each format and distribution."""
    records = [
        r
        for r in read(folder, "error_bound.jsonl")
        if r["metric"] == "relative_rms_error" and r["config"]["sweep"] == "format"
    ]
    if not records:
        return NOTHING
    kinds = ("normal", "student_t", "outlier_channels")
    found = {}
    for record in records:
        c = record["config"]
        key = (c["bits"], c["block_size"], c["distribution"], c["rotate"])
        found[key] = record["value"]
    pairs = sorted({key[:2] for key in found})
    rows = [
        (
            f"{bits} bits, block {block}",
            *(
                f"{found[bits, block, kind, rotate]:.4f}"
                for kind in kinds
                for rotate in (True, False)
            ),
        )
        for bits, block in pairs
    ]
    kinds_of = [
        f"{kind.replace('_', ' ')}, {'rotated' if rotate else 'not'}"
        for kind in kinds
        for rotate in (True, False)
    ]
    return _table(("format", *kinds_of), rows)


def activation_table(folder: pathlib.Path) -> str:
    """Error and bounds where the partial sums of a real model are summed."""
    cells: dict[tuple, dict[str, float]] = {}
    for record in read(folder, "error_bound.jsonl"):
        c = record["config"]
        if c.get("sweep") == "activations":
            key = (c["bits"], not c["rotate"], not c["feedback"], c["residual_dtype"])
            # Later looks at the same run replace earlier ones.
            cells.setdefault(key, {})[record["metric"]] = record["value"]
    rows = [
        (
            f"{bits} bits, {'not rotated' if plain else 'rotated'}, "
            + ("no feedback" if unpaid else f"{dtype} residual"),
            f"{cell['relative_rms_error']:.3f}",
            *(f"{cell[m] / cell['measured_error']:.2f}" for m in _BOUNDS),
            *(f"{cell[f'block_{m}_ratio']:.2f}" for m in _BOUNDS),
        )
        for (bits, plain, unpaid, dtype), cell in sorted(cells.items())
    ]
    head = ("sums", "relative rms", "typical / max", "worst / max")
    head = (*head, "typical, least of blocks", "worst, least of blocks")
    return _table(head, rows) if rows else NOTHING


_BOUNDS = ("typical_bound", "bound")


def outlier_table(folder: pathlib.Path) -> str:
    """What an event half-way does to the error, and how long."""
    found: dict[tuple, dict[str, float]] = {}
    for record in read(folder, "outliers.jsonl"):
        c = record["config"]
        dtype = c.get("residual_dtype", "no feedback")
        key = (c["event"], c["size"], c["bits"], not c["rotate"], dtype)
        found.setdefault(key, {})[record["metric"]] = record["value"]
    rows = [
        (
            f"{event.replace('_', ' ')} {size:,.0f}, {bits} bits, "
            f"{'not rotated' if plain else 'rotated'}, {dtype}",
            f"{cell['peak_error_ratio']:.3g}",
            f"{cell['final_error_ratio']:.3g}",
            f"{cell['recovery_calls']:.0f}" if "recovery_calls" in cell else "-",
        )
        for (event, size, bits, plain, dtype), cell in sorted(found.items())
    ]
    head = ("event", "largest error", "final error", "calls to recover")
    return _table(head, rows) if rows else NOTHING


def gradient_table(folder: pathlib.Path) -> str:
    """Relative error of the gradient, by variant."""
    records = read(folder, "gradient_error.jsonl")
    newest = {r["config"]["variant"]: r for r in records}
    if not newest:
        return NOTHING
    rows = [
        (name, f"{r['value']:.4f}", f"{r['spread']:.4f}") for name, r in newest.items()
    ]
    return _table(("sums in 4 bits", "relative gradient error", "spread"), rows)


_FEEDBACK = {"echo": "feedback", "no-feedback": "no feedback"}


def training_table(folder: pathlib.Path) -> str:
    """Held-out loss above the exact run's, mean over seeds."""
    records = read(folder, "train_seeds.jsonl")
    newest = {
        (-config["layers"], config.get("bits", 4), config["variant"]): record
        for record in records
        if record["metric"] == "mean_heldout_gap_percent"
        for config in [record["config"]]
    }
    if not newest:
        return NOTHING
    rows = [
        (
            f"{-layers}",
            f"{bits} bits, {_FEEDBACK.get(variant, variant)}",
            f"{r['value']:+.2f} %",
            f"{r['spread']:.2f}",
            f"{len(r['config']['seeds'])}",
            f"{r['config']['steps']}",
        )
        for (layers, bits, variant), r in sorted(newest.items(), reverse=True)
    ]
    head = ("layers", "sums", "held-out loss above exact", "spread", "seeds", "steps")
    return _table(head, rows)


def feedback_depth_table(folder: pathlib.Path) -> str:
    """What 4-bit sums do to models of growing depth."""
    records = read(folder, "feedback_depth.jsonl")
    depths = sorted({r["config"].get("layers", 0) for r in records} - {0})
    columns = [
        (metric, sums, variant)
        for metric, sums in (
            ("logit_kl", "reading"),
            ("heldout_gap_percent", "reading"),
            ("heldout_gap_percent", "training"),
        )
        for variant in ("echo", "no-feedback")
    ]
    rows = []
    for depth in depths:
        cells = [
            find(records, metric=metric, sums=sums, variant=variant, layers=depth)
            for metric, sums, variant in columns
        ]
        forms = [f"{r['value']:.2g}" if r else "-" for r in cells[:2]]
        # Adding nothing turns a rounded -0.0 into 0.0.
        gaps = [round(r["value"], 2) + 0.0 if r else None for r in cells[2:]]
        forms += ["-" if gap is None else f"{gap:+.2f} %" for gap in gaps]
        rows.append((f"{depth}", *forms))
    head = ("layers", "KL, feedback", "KL, none", "loss, feedback", "loss, none")
    head = (*head, "trained, feedback", "trained, none")
    return _table(head, rows) if rows else NOTHING


def from_records(
    file: str, table: Callable, **options
) -> Callable[[pathlib.Path], str]:
    """A table of another module, which takes the records of a file."""

    def make(folder: pathlib.Path) -> str:
        head, rows = table(read(folder, file), **options)
        return _table(head, rows) if rows else NOTHING

    return make


def kernel_table(folder: pathlib.Path) -> str:
    """Time of each stage at the reference setting: 1 GiB, 8 ranks, 4 bits, block 64."""
    stages = ("send", "reduce", "return", "return_add", "total")
    rows: dict[tuple[str, ...], dict[str, float]] = {}
    for record in read(folder, "bench_kernels.jsonl"):
        config = record["config"]
        reference = {"message_bytes": 1 << 30, "ranks": 8, "block_size": 64, "bits": 4}
        if record["metric"] == "codec_ms" and reference.items() <= config.items():
            rotated = "rotated" if config["rotate"] else "not rotated"
            row = (config["backend"], rotated, config["residual_dtype"])
            rows.setdefault(row, {})[config["stage"]] = record["value"]
    if not rows:
        return NOTHING
    cells = [
        (*row, *(f"{times[s]:.3f}" if s in times else "-" for s in stages))
        for row, times in sorted(rows.items())
    ]
    return _table(("backend", "rotation", "residual", *stages), cells)


def backend_table(folder: pathlib.Path) -> str:
    """The same training steps on two backends."""
    records = read(folder, "kernel_training.jsonl")
    rows = []
    for record in records:
        if record["metric"] == "final_loss":
            name = record["config"]["backend"]
            step = find(records, metric="step_ms", backend=name)
            milliseconds = f"{step['value']:.1f}" if step else "-"
            rows.append((name, f"{record['value']:.5f}", milliseconds))
    return _table(("backend", "loss", "ms a step"), rows) if rows else NOTHING


TABLES: dict[str, Callable[[pathlib.Path], str]] = {
    "depth": depth_table,
    "bound": bound_table,
    "format": format_table,
    "activations": activation_table,
    "outliers": outlier_table,
    "gradient": gradient_table,
    "training": training_table,
    "train-parity": from_records("train_parity.jsonl", training_tables.parity_table),
    "train-parity-deep": from_records(
        "train_parity.jsonl", training_tables.parity_table, layers=32
    ),
    "reading": from_records("reading.jsonl", training_tables.reading_table),
    "device-training": from_records(
        "device_training.jsonl", training_tables.device_table
    ),
    "feedback-depth": feedback_depth_table,
    "benchmarks": from_records(_PARITY, benchmark_tables.plan_table),
    "benchmarks-all": from_records(
        _PARITY, benchmark_tables.plan_table, every_set=True
    ),
    "benchmarks-padded": from_records(_PARITY, benchmark_tables.plan_table, ranks=8),
    "frontier": from_records(_PARITY, benchmark_tables.frontier_table),
    "variants": from_records(
        "benchmark_variants.jsonl", benchmark_tables.variants_table
    ),
    "kernels": kernel_table,
    "nvlink": from_records(_NVLINK, network_tables.nvlink_table),
    "nvlink-loaded": from_records(_NVLINK, network_tables.nvlink_loaded_table),
    "nvlink-flags": from_records(_NVLINK, network_tables.nvlink_flags_table),
    "nvlink-stages": from_records(_NVLINK, network_tables.nvlink_stage_table),
    "nvlink-model": from_records(_NVLINK, network_tables.nvlink_model_table),
    "network": from_records(_NETWORK, network_tables.idle_table),
    "network-algorithms": from_records(
        _NETWORK, network_tables.network_algorithms_table
    ),
    "network-torch": from_records(_NETWORK, network_tables.torch_table),
    "network-loaded": from_records(_NETWORK, network_tables.loaded_table),
    "network-model": from_records(_NETWORK, network_tables.model_table),
    "backends": backend_table,
    "cost-accuracy": from_records(_COST, cost_tables.accuracy_table),
    "cost-nvlink": from_records(_COST, cost_tables.nvlink_table),
    "cost-network": from_records(_COST, cost_tables.network_table),
    "cost-projected": from_records(_COST, cost_tables.projection_table),
}

SECTIONS = (
    ("Error against depth", "error_bound", "depth",
     "Root mean square error of the sum of all outputs so far, over that of one exact "
     "output; Gaussian values, 8 simulated ranks, block 64, rotated."),
    ("Error and bounds against ranks", "error_bound", "bound",
     "Largest error in block coordinates after four calls of Gaussian values; 4 bits, "
     "block 64, rotated."),
    ("Error of each format", "error_bound", "format",
     "Relative error as above, after 20 calls on 8 ranks with feedback."),
    ("Activations of a real model", "error_bound", "activations",
     "What three ranks of SmolLM2-135M-Instruct add in the 60 all-reduces of its "
     "layers on 256 tokens of prose, summed in order of depth; block 64. Error of the "
     "whole sum over the rms of one exact sum; bounds over the measured maximum, over "
     "all blocks, and the least of that in any block by its own peaks. Add `--model` "
     "and `--text` to the command."),
    ("Outliers and shifts", "outliers", "outliers",
     "Error in the values that are no outliers, over that before the event; a dash "
     "where there is no level to return to or a block has not returned to it."),
    ("Error of gradients", "gradient_error", "gradient",
     "Against the exact gradient of the same trained decoder, over 8 simulated ranks."),
    ("Training", "train_seeds", "training",
     "A small decoder trained from scratch on the same text in the same order; with 12 "
     "layers by `--num-layers 12 --seeds 0 1` and an earlier version, 3 bits by "
     "`--bits 3`."),
    *training_tables.SECTIONS,
    ("Harm by depth", "feedback_depth", "feedback-depth",
     "Decoders of one width. KL divergence of the logits, in nats, and held-out loss "
     "against exact sums: where an exactly trained model reads with its sums in 4 "
     "bits, and where it is trained with them both ways."),
    *benchmark_tables.SECTIONS,
    ("Kernels", "bench_kernels", "kernels",
     "Milliseconds on one H200 for 1 GiB of bfloat16, 8 ranks, 4 bits, block 64. "
     "Rotated Triton kernels with another residual than int8, Pallas and XLA were "
     "measured with an earlier version."),
    ("Training on two backends", "kernel_training", "backends",
     "Loss after 50 steps of the same training on one H200, 8 simulated ranks, with an "
     "earlier version, its kernels and XLA's attention."),
    *network_tables.NVLINK_SECTIONS,
    *network_tables.SLOW_SECTIONS,
    *cost_tables.SECTIONS,
)  # fmt: skip


def write_page(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Writes the results page of the documentation."""
    parts = [
        "# Results\n\nMade from `experiments/results/*.jsonl` alone; each line there "
        "has its configuration, versions, device, commit and seed.\n"
    ]
    for title, script, name, text in SECTIONS:
        command = f"python experiments/{script}.py"
        parts.append(f"## {title}\n\n{text}\n\n`{command}`\n\n{TABLES[name](folder)}\n")
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(parts))


def with_tables(text: str, folder: pathlib.Path) -> str:
    """The text with each of its generated tables made anew."""
    return _BLOCK.sub(
        lambda match: f"{match[1]}\n{TABLES[match['name']](folder)}\n\n{match[3]}", text
    )


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    arguments = parser.parse_args()
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = with_tables(old, RESULTS)
    if arguments.check and new != old:
        sys.exit("README.md is not up to date: run python docs/results.py")
    if not arguments.check:
        readme.write_text(new)


if __name__ == "__main__":
    main()
