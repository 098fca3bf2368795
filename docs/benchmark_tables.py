"""Tables and series of what few bits cost a real model, from records alone.

Every function takes the records of ``benchmark_parity.jsonl``, the oldest first, and
returns ``(head, rows)`` of strings, or series of numbers; nothing where nothing was
measured.
"""

Rows = list[tuple[str, ...]]

# As ``benchmark_parity.py`` names its plans, and as readers do.
_PLANS = {
    "exact": "exact",
    "edges": "4 bits, edges",
    "graded": "4 bits, graded edges",
    "sensitivity": "4 bits, by sensitivity",
    "uniform": "4 bits, every call",
    "plain": "4 bits, plain",
    "8-bit": "8 bits",
    "3-bit": "3 bits",
}
_SETS = {
    "hellaswag": "HellaSwag",
    "piqa": "PIQA",
    "arc_easy": "ARC-easy",
    "sciq": "SciQ",
    "lambada": "LAMBADA",
    "winogrande": "WinoGrande",
    "boolq": "BoolQ",
}
_MORE_SETS = {
    "arc_challenge": "ARC-challenge",
    "openbookqa": "OpenBookQA",
    "blimp": "BLiMP",
}


# Title, script, table and words of the sections of the results page.
SECTIONS = (
    ("Benchmarks of a real model", "benchmark_parity", "benchmarks-all",
     "SmolLM2-135M-Instruct (weights from a 4-bit GGUF file) in bfloat16 on three "
     "ranks, simulated on one H200; block 64. Whole sets without examples: accuracy "
     "with exact sums, and the difference in points, question by question, with its "
     "standard error. *Graded*: the first call and the last in 8 bits, seven and one "
     "beside them in 6. Plain is neither rotated nor repaid. *Edges*, *graded* and *by "
     "sensitivity* in 4.50 bits were run with the sum added to the stream in the pass "
     "that decodes it, the others before that, with one more rounding to bfloat16; "
     "each is set against the exact sums of its own run. On 65,536 tokens of prose: "
     "KL divergence of the logits to exact, in nats, and loss above exact. Give "
     "`--model` and `--questions`, a file that `experiments/benchmark_questions.py` "
     "makes."),
    ("On eight ranks, with padded heads", "benchmark_parity", "benchmarks-padded",
     "The same seven sets and prose with `--ranks 8`: nine heads and three groups of "
     "keys and values do not divide, and are padded."),
    ("The price of quality", "benchmark_frontier", "frontier",
     "The same model and prose in float32, so that nothing else rounds; plans were "
     "made on other parts of the text. The table has the plans that no other beats "
     "with as few bits or fewer; *edges 2 1* has two layers in 8 bits at the start and "
     "one at the end.\n\n![KL divergence on prose against bits a value, by kind of "
     "plan](frontier.svg)"),
    ("What other formats would be worth", "benchmark_variants", "variants",
     "The same model and prose on a CPU, in float32 with three simulated ranks: few "
     "tokens, so compare the changes against the default plan, which are taken window "
     "by window. Bits count everything: both roundings on average, scales, kept values "
     "and their places. The library has the plans of its own widths and the block "
     "sizes; the rest would be new. *4 and 5 bits*: what ranks send, and the sum that "
     "they get back. *Best of 2 scales*: the sender takes, for each block, the scale "
     "with the smaller error; the format stays as it is. *Uneven levels*: closer near "
     "zero, as rotated values are. *Kept*: the largest values, found before the "
     "rotation (*model*) or after it, travel in bfloat16 beside the codes. *Scale in a "
     "byte*: 3 bits of fraction unless it says 2. *Graded*: edges in 6 bits, the last "
     "call in 8."),
)  # fmt: skip


def plan_table(
    records: list[dict], *, ranks: int = 3, every_set: bool = False
) -> tuple[tuple, Rows]:
    """One column a plan: bytes, the mean of seven sets, each set, and prose.

    Without ``every_set``, only plans that all seven sets were run with, and of those
    that were made anew the newest.
    """
    cells: dict[tuple, dict] = {}
    newest: dict[str, tuple] = {}
    for record in records:
        config = record["config"]
        wanted = config["ranks"] == ranks and config.get("main", True)
        if wanted and not config.get("frontier"):
            plan = (config["plan"], round(config["bits_per_value"], 2))
            newest[config["plan"]] = plan
            key = (plan, record["metric"], config.get("task"))
            cells[key] = record
    needed = (
        ("bytes_per_token",) if every_set else ("bytes_per_token", "mean7_accuracy")
    )
    found = sorted({plan for plan, _, _ in cells if plan[0] in _PLANS}, reverse=True)
    plans = [
        plan
        for name in _PLANS
        for plan in found
        if plan[0] == name
        and (every_set or plan == newest[name])
        and all((plan, metric, None) in cells for metric in needed)
    ]
    if not plans:
        return (), []

    def row(name: str, form, metric: str, exact_metric=None, task=None):
        found = [
            cells.get((plan, (plan[0] == "exact" and exact_metric) or metric, task))
            for plan in plans
        ]
        return (name, *(form(record) if record else "-" for record in found))

    rows = [("bits a value", *(f"{bits:.2f}" for _, bits in plans))]
    rows += [row("bytes a token", lambda r: f"{r['value']:,.0f}", "bytes_per_token")]
    rows += [row("mean of seven", _points, "mean7_diff_points", "mean7_accuracy")]
    for task, name in (_SETS | (_MORE_SETS if every_set else {})).items():
        rows += [row(name, _points, "task_diff_points", "task_accuracy", task)]
    rows += [row("prose: KL", lambda r: f"{r['value']:.4f}", "logit_kl")]
    rows += [row("prose: loss", lambda r: f"{r['value']:+.2f} %", "loss_gap_percent")]
    if every_set:
        two = lambda r: f"{r['value']:,.2f}"  # noqa: E731
        rows += [row("prose: perplexity", two, "perplexity")]
        rows += [row("prose: same likeliest token", two, "top1_agreement")]
    return ("", *(_PLANS[name] for name, _ in plans)), rows


def _points(record: dict) -> str:
    """An accuracy, or a difference with its paired standard error."""
    if record["config"]["plan"] == "exact":
        return f"{record['value']:.2f} %"
    return f"{record['value']:+.2f} ± {record['spread']:.2f}"


def frontier(records: list[dict]) -> list[dict]:
    """``{plan, block_size, bits, kl, error, loss}`` of every plan, by bits a value."""
    found: dict[tuple, dict] = {}
    for record in records:
        config = record["config"]
        if config.get("frontier"):
            key = (config["plan"], config["block_size"], config["bits_per_value"])
            cell = dict(zip(("plan", "block_size", "bits"), key, strict=True))
            cell = found.setdefault(key, cell)
            if record["metric"] == "logit_kl":
                cell |= {"kl": record["value"], "error": record["spread"]}
            elif record["metric"] == "loss_gap_percent":
                cell["loss"] = record["value"]
    return sorted(found.values(), key=lambda cell: (cell["bits"], cell["kl"]))


def frontier_table(records: list[dict]) -> tuple[tuple, Rows]:
    """The plans that no other beats with as few bits or fewer."""
    rows: Rows = []
    least = float("inf")
    for cell in frontier(records):
        if cell["kl"] < least:
            least = cell["kl"]
            rows.append(
                (
                    f"{cell['bits']:.2f}",
                    cell["plan"],
                    f"{cell['block_size']}",
                    f"{cell['kl']:.3g} ± {cell['error']:.1g}",
                    f"{cell['loss']:+.2f} %",
                )
            )
    return ("bits a value", "plan", "block", "KL", "loss"), rows


def variants_table(records: list[dict]) -> tuple[tuple, Rows]:
    """Every variant of the wire format, by bits a value."""
    cells: dict[tuple, dict] = {}
    for record in records:
        config = record["config"]
        key = (config["bits_per_value"], config["plan"])
        cells.setdefault(key, {})[record["metric"]] = record
    rows = [
        (
            plan,
            f"{bits:.2f}",
            f"{cell['logit_kl']['value']:.4f}",
            _change(cell["logit_kl_change_percent"]),
            f"{cell['loss_gap_percent']['value']:+.2f} %",
        )
        for (bits, plan), cell in sorted(cells.items())
    ]
    return ("plan", "bits a value", "KL", "change", "loss"), rows


def _change(record: dict) -> str:
    """A difference in percent with its standard error; the baseline has none."""
    if record["config"]["plan"] == record["baseline"]:
        return "-"
    return f"{record['value']:+.0f} ± {record['spread']:.0f} %"
