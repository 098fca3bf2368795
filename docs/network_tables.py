"""Tables of sums and decoders over NVLink and over slow links, from records alone.

Every function takes the records of ``bench_nvlink.jsonl`` or ``bench_network.jsonl``,
the oldest first, and returns ``(head, rows)`` of strings; no rows where nothing was
measured.
"""

import collections
import math

import cost_tables

Rows = list[tuple[str, ...]]

_MODEL_PARTS = {"ttft": "time to first token", "step": "training step"}

# Title, script, table and words of the sections of the results page.
NVLINK_SECTIONS = (
    ("Sums over NVLink", "bench_nvlink", "nvlink",
     "Two H200s of one host: time of the exact sum, and how much faster each case is. "
     "Two ranks are where few bits gain least: half of every message stays at home. "
     "As shipped, messages under 32 MiB are a psum; the other cases send every one "
     "through the codec, with the residual in one byte a value unless they say "
     "otherwise. Of 256 MiB and 1 GiB the cases *8 bits* and, in one piece, *int4 "
     "residual* were measured with an earlier version. 2 GiB, and of 64 MiB the exact "
     "sum, *default settings* and *4 bits* and *one shot* in one piece, were measured "
     "again on another machine of the kind. There 64 MiB were slower in 4 bits than "
     "exact, on the first machine faster: such a sum is made of kernels of 0.1 ms and "
     "less, and hangs on how fast the host launches them."),
    ("Sums over NVLink beside other traffic", "bench_nvlink", "nvlink-loaded",
     "The same, while another process copies between the two GPUs, both ways, and "
     "takes the stated part of what such copies reach alone; where it wants all, it "
     "gets what the sums leave. 64 MiB was measured with an earlier version, but for "
     "the exact sum, *default settings*, *4 bits* and *4 bits, one shot*; every ratio "
     "is to the exact sum of its own run. Of 1 GiB and 256 MiB, links of which all are "
     "wanted were measured with an earlier version."),
    ("Sums over NVLink with flags of XLA", "bench_nvlink", "nvlink-flags",
     "The same, no other traffic, beside runs with flags in the environment variable "
     "`XLA_FLAGS`: exchanges go through the GPUs' copy engines instead of NCCL's "
     "kernels, or from memory that is registered with NCCL. All are set against the "
     "exact sum without flags, which is the fastest: registered memory speeds up the "
     "exchanges of bytes and slows down NCCL's sum. The copy engines alone were "
     "measured with an earlier version."),
    ("Stages of a sum over NVLink", "bench_nvlink", "nvlink-stages",
     "The same: what a sum in 4 bits, rotated, with the residual in one byte, is made "
     "of, each stage alone, beside the exact sum. A stage is timed in a chain of "
     "calls that each need the one before, and what ties them together counts: all "
     "stages of a message together take longer than its sum. The bandwidth is the "
     "bytes that a rank sends over the time."),
    ("A decoder over NVLink", "bench_nvlink", "nvlink-model",
     "Two H200s of one host, random weights, the default `min_bytes`, residuals in one "
     "byte a value, attention by cuDNN; others' traffic as above. The sums of 8,192 "
     "tokens, whose first token was timed with parameters in float32, have 64 MiB; "
     "those of 2,048, with parameters in bfloat16, have 16 MiB, which the default "
     "leaves exact: there all plans run the same sums, and differ by as much as rounds "
     "do. *Echo*: 4 bits at every call; *echo edges*: 8 in the first two layers and "
     "the last; *echo one shot*: 4 bits in one exchange. Over idle links nothing is "
     "gained, and 8 bits cost more than they save. The more others take, the more is "
     "gained for the first token; what a training step gains even then is less than "
     "its rounds differ by."),
)  # fmt: skip
SLOW_SECTIONS = (
    ("Sums over a slow network", "bench_network", "network",
     "Processes on one machine of two cores, each in a network namespace with a "
     "limited link: time of a float16 `psum`, and how much faster echo's best is, by "
     "the bytes of a message. Under 1 echo loses.\n\n![Times as fast as a float16 "
     "psum, by message, ranks and others' traffic](network.svg)\n\nSmall messages: "
     "up to 16 KiB nearly all of the time is latency, and echo, which has two "
     "exchanges, mostly ties or loses on two and four; from 256 KiB on it wins. More "
     "ranks, which share the two cores: the gain of 16 MiB falls over links of 200 "
     "Mbit/s and less, and rises without a limit, since the exact sum slows down more. "
     "All cells are of one run, with `--parts allreduce --chunks 1 4 8`."),
    ("One shot over a slow network", "bench_network", "network-algorithms",
     "The same by `--parts algorithms`: a float16 `psum`, and how much faster echo is "
     "in two shots and in one."),
    ("Sums of PyTorch over a slow network", "bench_network", "network-torch",
     "PyTorch's gloo in the same namespaces, by `--torch PYTHON`: time of its "
     "all-reduce of float16, and how much faster echo's best of *Sums over a slow "
     "network* is, which was measured earlier. Over limited links echo gains about as "
     "much as over JAX's. Without a limit it mostly loses: PyTorch adds float16 "
     "several times as fast as JAX's `psum` of it."),
    ("Sums beside other traffic", "bench_network", "network-loaded",
     "As in *Sums over a slow network*; datagrams of others take the stated part of "
     "every link, both ways."),
    ("A decoder over a slow network", "bench_network", "network-model",
     "In the same namespaces, random weights, two processes, prompts and sequences of "
     "256 tokens. Exact sums travel in float16. The rate is the one at which sums take "
     "about a quarter of the time to the first token on an idle link. Idle links with "
     "`--backgrounds 0 --budget 30`, others with the fewest rounds, three."),
)  # fmt: skip


def nvlink_table(records: list[dict]) -> tuple[tuple, Rows]:
    """Sums by size: the exact time, and how much faster each case is."""
    times: dict[int, str] = {}
    ratios: dict[str, dict[int, str]] = {}
    for record in records:
        config = record["config"]
        if config.get("xla_flags") or config.get("background"):
            continue
        size, case = (config.get(key) for key in ("message_bytes", "case"))
        if record["metric"] == "allreduce_ms" and case == "psum bf16":
            times[size] = f"{record['value']:.3f} ms"
        elif record["metric"] == "allreduce_speedup" and case != "psum bf16":
            # What is exact by its size runs the same program as the psum beside it.
            ratio = "psum" if config["path"] == "exact" else f"{record['value']:.2f}x"
            ratios.setdefault(case, {})[size] = ratio
    sizes = sorted(times)
    rows = [
        (case, *(found.get(size, "-") for size in sizes))
        for case, found in {"psum bf16": times, **ratios}.items()
    ]
    return ("case", *map(cost_tables.size_in_words, sizes)), rows if sizes else []


def nvlink_loaded_table(records: list[dict]) -> tuple[tuple, Rows]:
    """Sums over links of which others take a part: times as fast as the exact sum."""
    cells: dict[tuple, dict[float, str]] = {}
    for record in records:
        config = record["config"]
        if "background" not in config or config.get("xla_flags"):
            continue
        if record["metric"] == "allreduce_ms" and config["case"] == "psum bf16":
            text = f"{record['value']:.3f} ms"
        elif record["metric"] == "allreduce_speedup" and config["case"] != "psum bf16":
            text = f"{record['value']:.2f}x"
        else:
            continue
        cell = cells.setdefault((config["message_bytes"], config["case"]), {})
        cell[config["background"]] = text
    loaded = {cell: found for cell, found in cells.items() if len(found) > 1}
    levels = sorted({level for found in loaded.values() for level in found})
    rows = [
        (
            cost_tables.size_in_words(size),
            case,
            *(found.get(level, "-") for level in levels),
        )
        for (size, case), found in sorted(loaded.items(), key=lambda row: row[0][0])
    ]
    return ("message", "case", *map(_level, levels)), rows


def _level(share: float) -> str:
    """How much of the links others want."""
    return {0.0: "idle", 1.0: "all wanted"}.get(share, f"{100 * share:.0f} % taken")


def nvlink_flags_table(records: list[dict]) -> tuple[tuple, Rows]:
    """Times without and with XLA's flags, and how much faster than psum without any."""
    cells: dict[tuple, dict[str, float]] = {}
    for record in records:
        config = record["config"]
        timed = record["metric"] == "allreduce_ms" and config["path"] != "exact"
        if timed and not config.get("background"):
            cell = cells.setdefault((config["message_bytes"], config["case"]), {})
            cell[config["xla_flags"]] = record["value"]
    flags = sorted({flag for found in cells.values() for flag in found})
    rows = []
    for (size, case), found in sorted(cells.items()):
        if "" not in found or len(found) == 1:
            continue
        psum = cells[size, "psum bf16"][""]
        texts = (
            f"{found[f]:.3f} ms, {psum / found[f]:.2f}x" if f in found else "-"
            for f in flags
        )
        rows.append((cost_tables.size_in_words(size), case, *texts))
    return ("message", "case", *map(_flags_in_words, flags)), rows


def _flags_in_words(flags: str) -> str:
    """Each flag as code."""
    return ", ".join(f"`{flag}`" for flag in flags.split()) or "no flag"


def nvlink_stage_table(records: list[dict]) -> tuple[tuple, Rows]:
    """Time of each stage of a sum by the bytes of the message, and what it sends."""
    cells: dict[str, dict[int, str]] = {}
    for record in records:
        config = record["config"]
        if record["metric"] == "stage_ms" and not config.get("xla_flags"):
            text = f"{record['value']:.3f} ms"
            if "bus_bytes_per_second" in config:
                text += f", {config['bus_bytes_per_second'] / 1e9:,.0f} GB/s"
            cells.setdefault(config["stage"], {})[config["message_bytes"]] = text
    sizes = sorted({size for found in cells.values() for size in found})
    rows = [
        (stage, *(found.get(size, "-") for size in sizes))
        for stage, found in cells.items()
    ]
    return ("stage", *map(cost_tables.size_in_words, sizes)), rows


def nvlink_model_table(records: list[dict]) -> tuple[tuple, Rows]:
    """First token and training step of a decoder over the links."""
    ratios = {
        (record["metric"], str(record["config"])): record["value"] for record in records
    }
    rows = {}
    for record in sorted(records, key=lambda r: r["metric"] != "ttft_ms"):
        part, config = record["metric"].removesuffix("_ms"), record["config"]
        if part in _MODEL_PARTS and not config.get("xla_flags"):
            ratio = ratios.get((f"{part}_speedup", str(config)))
            row = (
                _MODEL_PARTS[part],
                _level(config.get("background", 0.0)),
                config["plan"],
                f"{config['parameters'] / 1e9:.2f} B",
                f"{config['length']:,}",
            )
            # Later measurements replace earlier ones.
            rows[row] = (f"{record['value']:.1f}", f"{ratio:.2f}x" if ratio else "-")
    head = ("what", "links", "plan", "parameters", "tokens", "ms", "against exact")
    return head, [(*row, *found) for row, found in rows.items()]


def idle_table(records: list[dict]) -> tuple[tuple, Rows]:
    """Sums over idle links: the exact time, and how much faster echo's best is."""
    exact, best = _sums(records)
    idle = [cell for cell in exact if not cell[2]]
    rates = collections.defaultdict(set)
    for _, rate, _, size in idle:
        rates[size].add(rate)
    most = max(map(len, rates.values()), default=0)
    # A size of few rates would be a column of dashes.
    sizes = sorted(size for size, found in rates.items() if 2 * len(found) >= most)
    rows = [
        (
            f"{processes}",
            _link(rate),
            *(_ratio(exact, best, (processes, rate, 0, size)) for size in sizes),
        )
        for processes, rate in sorted({cell[:2] for cell in idle})
    ]
    return ("processes", "link", *map(cost_tables.size_in_words, sizes)), rows


def torch_table(records: list[dict]) -> tuple[tuple, Rows]:
    """PyTorch's all-reduce of float16 over idle links, and how much faster echo is."""
    exact, best = _sums(records)
    theirs: dict[tuple, float] = {}
    gain: dict[tuple, float] = {}
    for record in records:
        config = record["config"]
        if config["part"] == "torch" and config["dtype"] == "float16":
            rate = config["rate_mbit"] or math.inf
            cell = (config["processes"], rate, 0, config["message_bytes"])
            theirs[cell] = record["value"]
            if cell in best:
                gain[cell] = record["value"] * best[cell] / exact[cell]
    sizes = sorted({cell[3] for cell in theirs})
    rows = [
        (
            f"{processes}",
            _link(rate),
            *(_ratio(theirs, gain, (processes, rate, 0, size)) for size in sizes),
        )
        for processes, rate in sorted({cell[:2] for cell in theirs})
    ]
    return ("processes", "link", *map(cost_tables.size_in_words, sizes)), rows


def loaded_table(records: list[dict]) -> tuple[tuple, Rows]:
    """As :func:`idle_table`, by the part of the link that others take."""
    exact, best = _sums(records)
    levels = sorted({cell[2] for cell in exact})
    loaded = sorted({(cell[0], cell[1], cell[3]) for cell in exact if cell[2]})
    rows = [
        (
            f"{processes}",
            _link(rate),
            cost_tables.size_in_words(size),
            *(_ratio(exact, best, (processes, rate, level, size)) for level in levels),
        )
        for processes, rate, size in loaded
    ]
    head = (f"{level} % taken" if level else "idle" for level in levels)
    return ("processes", "link", "message", *head), rows


def model_table(records: list[dict]) -> tuple[tuple, Rows]:
    """First token and training step of a decoder beside others' traffic."""
    newest: dict[tuple, dict[str, float]] = {}
    for record in records:
        config = record["config"]
        if config["part"] in _MODEL_PARTS and config["network"] == "namespaces":
            rate = config["rate_mbit"] or math.inf
            cell = (config["part"], rate, config["background"])
            metric = f"{record['metric']} {config['plan']}"
            newest.setdefault(cell, {})[metric] = record["value"]
    rows = [
        (
            _MODEL_PARTS[part],
            _link(rate),
            f"{percent} %",
            f"{cell[f'{part}_ms exact']:,.0f}",
            f"{100 * cell['communication_share compute alone']:.0f} %",
            f"{cell[f'{part}_speedup echo']:.2f}x",
        )
        for (part, rate, percent), cell in sorted(
            newest.items(), key=lambda item: (item[0][0] != "ttft", item[0][1:])
        )
    ]
    head = (
        *("what", "link", "others' traffic", "exact, ms", "of it communication"),
        "echo against exact",
    )
    return head, rows


def _sums(records: list[dict]) -> tuple[dict[tuple, float], dict[tuple, float]]:
    """``(processes, Mbit/s, percent taken, bytes)``: exact ms, echo's best speed-up."""
    exact: dict[tuple, float] = {}
    best: dict[tuple, float] = {}
    for record in records:
        config = record["config"]
        if config["part"] != "allreduce" or config["network"] != "namespaces":
            continue
        rate = config["rate_mbit"] or math.inf
        place = (config["processes"], rate, config["background"])
        cell = (*place, config["message_bytes"])
        if record["metric"] == "allreduce_ms" and config["case"] == "psum float16":
            exact[cell] = record["value"]
            best.pop(cell, None)  # what follows was measured with it
        elif record["metric"] == "allreduce_speedup" and config["path"] == "echo":
            best[cell] = max(record["value"], best.get(cell, 0.0))
    return exact, best


def network_algorithms_table(records: list[dict]) -> tuple[tuple, Rows]:
    """Sums in two shots and in one, each against the exact sum of the same rounds."""
    cells: dict[tuple, dict[str, float]] = {}
    for record in records:
        config = record["config"]
        if config["part"] != "algorithms" or config["network"] != "namespaces":
            continue
        place = (config["processes"], config["rate_mbit"] or math.inf)
        cell = cells.setdefault((*place, config["message_bytes"]), {})
        if record["metric"] == "allreduce_ms" and config["path"] == "psum":
            cell["exact"] = record["value"]
        elif record["metric"] == "allreduce_speedup" and config["path"] == "echo":
            cell[config["algorithm"]] = record["value"]
    rows = [
        (
            f"{processes}",
            _link(rate),
            cost_tables.size_in_words(size),
            f"{cell['exact']:,.2f} ms",
            f"{cell['two-shot']:.2f}x",
            f"{cell['one-shot']:.2f}x",
        )
        for (processes, rate, size), cell in sorted(cells.items())
    ]
    head = ("processes", "link", "message", "psum float16", "two shots", "one shot")
    return head, rows


def _ratio(exact: dict, best: dict, cell: tuple) -> str:
    """Milliseconds of the exact sum, and times that the other is faster."""
    if cell not in exact or cell not in best:
        return "-"
    return f"{exact[cell]:,.1f} ms, {best[cell]:.2f}x"


def _link(mbit: float) -> str:
    return "no limit" if mbit == math.inf else f"{mbit:,g} Mbit/s"
