"""Tables of long training runs, from records alone.

Every function takes the records of one experiment, the oldest first, and returns
``(head, rows)`` of strings; no rows where nothing was measured.
"""

Rows = list[tuple[str, ...]]

_VARIANTS = {
    "echo": "4 bits",
    "forward-only": "4 bits, forward alone",
    "no-feedback": "4 bits, no feedback",
    "echo-3bit": "3 bits",
    "edges": "4 bits, edges",
}

SECTIONS = (
    ("Training on a real corpus", "train_parity", "train-parity",
     "A decoder of 44 M parameters in bfloat16, eight tensor-parallel ranks simulated "
     "on one H200, 32,768 tokens a step: held-out loss above that of the run with "
     "exact sums after the same tokens, in percent, with the standard error over 16 "
     "held-out batches where it was kept; *read exactly* is the last of them when the "
     "held-out text is read with exact sums; and tokens a second beside those of the "
     "exact run, on several machines of one kind, whose speeds differ as much as the "
     "variants': *edges* sends more bits than the first row and was faster. The text "
     "has 36 M tokens and was read about eight times; the learning rate falls to zero "
     "over the last fifth. The shorter runs stopped on the way. Each run has an exact "
     "one of its own: the first is of an earlier version, with XLA's attention, the "
     "second of the same books cut into other pieces and held out otherwise, the third "
     "is the second with another seed. So far apart are runs of one kind: the error "
     "over batches says nothing of it. Give `--data`, a folder that `echo-jax prepare` "
     "wrote, and `--work`; for the third run `--seed 1 --other-tokens 300000000`."),
    ("Training a deep decoder", "train_parity", "train-parity-deep",
     "The same with 32 layers and 36 M parameters, by `--layers 32 --width 256`, with "
     "cuDNN's attention. Runs 1 and 2 have a schedule of 100 M tokens, for which the "
     "text is read about three times (`--tokens 100000000`): run 1 is of the books cut "
     "as in the first run above, and of it not all variants came to the end; run 2 is "
     "complete, and in it 3 bits with feedback are nearer to exact sums than 4 bits "
     "without it at every point. Run 3 has the schedule of 300 M tokens. Its version "
     "joins products and ran with `--unroll 32`, which speeds up all but the codec: "
     "both train faster than in run 2, and 4 bits lose more to exact sums."),
    ("Training and reading", "reading", "reading",
     "Decoders of 8 layers, trained as above for 200 steps on the text of the main job "
     "with the sums on the left, read the held-out text with the sums above: loss over "
     "that of exact sums in both, in percent, mean of two seeds and their standard "
     "deviation. *First*: 8 bits in the first two layers; *last*: in the last; "
     "*edges*: in both. Rows differ by the noise of training: compare within a row."),
    ("Devices and simulated ranks", "device_training", "device-training",
     "Two ranks, 50 steps, at most so many percent between the losses of a step: ranks "
     "on devices of their own against ranks simulated on one, and, as a scale, exact "
     "sums against the same simulated run. For exact sums that is one program run "
     "twice. *Differing*: of the parameters that all ranks hold, those of which any "
     "bit differs between ranks at the end. With both values of `--dtype`; on the GPUs "
     "with `XLA_FLAGS=--xla_gpu_deterministic_ops=true`, on the CPU with "
     "`XLA_FLAGS=--xla_force_host_platform_device_count=2` and `--ranks 2 --layers 2 "
     "--width 128 --batch-size 2 --length 64`."),
)  # fmt: skip


def parity_table(
    records: list[dict], *, layers: int = 8, points: int = 6
) -> tuple[tuple, Rows]:
    """One row a variant and run: its gap to the exact run after more and more tokens.

    Variants on one text, with one schedule and one seed, are one run, and compared with
    each other alone.
    """
    gaps: dict[tuple, dict[int, str]] = {}  # after millions of tokens
    reading: dict[tuple, str] = {}
    speeds: dict[tuple, float] = {}
    runs: list[tuple] = []  # text, schedule and seed, in the order of the records
    for record in records:
        config = record["config"]
        if config["layers"] != layers:
            continue
        run = (config.get("corpus"), config["schedule_tokens"], record["seed"])
        variant = config["variant"]
        if run not in runs:
            runs.append(run)
        if record["metric"] == "heldout_gap_percent":
            tokens = round(config["tokens"] / 1e6)
            gaps.setdefault((run, variant), {})[tokens] = _gap(record)
        elif record["metric"] == "reading_gap_percent" and config["reading"] == "exact":
            reading[run, variant] = _gap(record)
        elif record["metric"] == "tokens_per_second":
            speeds[run, variant] = record["value"]
    longest = sorted(max(gaps.values(), key=len, default={}))
    stops = _spaced(longest, points)
    rows = []
    for variant, name in _VARIANTS.items():
        for number, run in enumerate(runs, start=1):
            row = (run, variant)
            if row not in gaps:
                continue
            speed = speeds[row] / speeds[run, "exact"] if row in speeds else None
            rows.append(
                (
                    name,
                    f"{number}",
                    *(gaps[row].get(tokens, "-") for tokens in stops),
                    reading.get(row, "-"),
                    f"{speed:.2f}x" if speed else "-",
                )
            )
    head = (f"{tokens} M" for tokens in stops)
    return ("sums", "run", *head, "read exactly", "tokens a second"), rows


def _gap(record: dict, digits: int = 2) -> str:
    error = record["spread"]
    spread = "" if error is None else f" ± {error:.{digits}f}"
    return f"{record['value']:+.{digits}f}{spread}"


_READING = {
    "exact": "exact",
    "echo": "4 bits",
    "first": "first",
    "last": "last",
    "edges": "edges",
    "no-feedback": "4 bits, no feedback",
}


def reading_table(records: list[dict]) -> tuple[tuple, Rows]:
    """One row for what trained, one column for what reads."""
    newest = {
        (r["config"]["trained"], r["config"]["reading"]): _gap(r, digits=3)
        for r in records
        if r["metric"] == "mean_reading_gap_percent"
    }
    newest |= {("exact", "exact"): "0"} if newest else {}
    trained = [sums for sums in _READING if (sums, "echo") in newest]
    read = [sums for sums in _READING if ("exact", sums) in newest]
    rows = [
        (_READING[left], *(newest.get((left, sums), "-") for sums in read))
        for left in trained
    ]
    return ("trained with", *(f"read: {_READING[sums]}" for sums in read)), rows


def device_table(records: list[dict]) -> tuple[tuple, Rows]:
    """One row a variant of ``device_training.jsonl``: how far apart its ranks are."""
    found: dict[tuple, dict[str, dict]] = {}
    for record in records:
        config = record["config"]
        run = (record["device"], config["dtype"], config["variant"])
        found.setdefault(run, {})[record["metric"]] = record
    rows = [
        (
            device,
            "exact" if variant == "exact" else _VARIANTS[variant],
            dtype,
            f"{cell['largest_loss_difference_percent']['value']:.2g} %",
            f"{cell['distance_of_exact_percent']['value']:.2g} %",
            f"{cell['differing_replicas']['value']:.0f} of "
            f"{cell['differing_replicas']['config']['of']}",
        )
        for (device, dtype, variant), cell in found.items()
    ]
    return ("ranks", "sums", "dtype", "devices", "exact sums", "differing"), rows


def _spaced(tokens: list[int], points: int) -> list[int]:
    """The first two and the last, and others about equally far apart between them."""
    if len(tokens) <= points:
        return tokens
    step = (tokens[-1] - tokens[1]) / (points - 2)
    wanted = [tokens[1] + step * n for n in range(points - 1)]
    nearest = (min(tokens, key=lambda t, w=w: abs(t - w)) for w in wanted)
    return sorted({tokens[0], *nearest})
