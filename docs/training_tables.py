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
     "on one H200, 32,768 tokens a step, one seed: held-out loss above that of the run "
     "with exact sums after the same tokens, in percent, with the standard error over "
     "16 held-out batches where it was kept; and tokens a second beside those of the "
     "exact run, on several machines of one kind, whose speeds differ as much as the "
     "variants': *edges* sends more bits than the first row and was faster. The text "
     "has 36 M tokens and was read about eight times; the learning rate falls to zero "
     "over the last fifth. The shorter runs stopped on the way. The last row is of "
     "another version, with cuDNN's attention where the others have XLA's, and of the "
     "same books cut into other pieces and held out otherwise; it is compared with an "
     "exact run of its own. So far apart are two runs of one kind: the error over "
     "batches says nothing of it. Give `--data`, a folder that `echo-jax prepare` "
     "wrote, and `--work`."),
    ("Training a deep decoder", "train_parity", "train-parity-deep",
     "The same with 32 layers, 36 M parameters and a schedule of 100 M tokens, for "
     "which the text is read about three times, by "
     "`--layers 32 --width 256 --tokens 100000000`, with cuDNN's attention: here 3 "
     "bits with feedback are nearer to exact sums than 4 bits without it, at every "
     "point that both have on one text. Without feedback the end was reached on the "
     "text prepared again alone, 4 bits with feedback did not reach it."),
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
    """One row a variant and text: its gap to the exact run after more and more tokens.

    Runs on one text are compared with each other alone.
    """
    gaps: dict[tuple, dict[int, str]] = {}
    speeds: dict[tuple, float] = {}
    texts: list[str | None] = []  # checksums, in the order of the records
    for record in records:
        config = record["config"]
        if config["layers"] != layers:
            continue
        text, variant = config.get("corpus"), config["variant"]
        if text not in texts:
            texts.append(text)
        if record["metric"] == "heldout_gap_percent":
            error = record["spread"]
            gap = f"{record['value']:+.2f}" + (f" ± {error:.2f}" if error else "")
            gaps.setdefault((text, variant), {})[config["tokens"]] = gap
        elif record["metric"] == "tokens_per_second":
            speeds[text, variant] = record["value"]
    longest = sorted(max(gaps.values(), key=len, default={}))
    stops = _spaced(longest, points)
    rows = []
    for number, text in enumerate(texts):
        for variant, name in _VARIANTS.items():
            run = (text, variant)
            if run not in gaps:
                continue
            speed = speeds[run] / speeds[text, "exact"] if run in speeds else None
            rows.append(
                (
                    name + ("" if number == 0 else ", text prepared again"),
                    *(gaps[run].get(tokens, "-") for tokens in stops),
                    f"{speed:.2f}x" if speed else "-",
                )
            )
    head = (f"{tokens / 1e6:.0f} M" for tokens in stops)
    return ("sums", *head, "tokens a second"), rows


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
