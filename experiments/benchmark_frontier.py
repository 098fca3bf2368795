"""Which plan gives the best predictions for a bit? KL on prose against bits a value.

Plans of one width, with wider ends, by sensitivity and by search, with and without
feedback, at several block sizes. Calibrated on some windows of the text, judged on
others. ``benchmark_questions.py`` makes the file with the prose.

    python experiments/benchmark_frontier.py --model MODEL    # minutes on an H200
    python experiments/benchmark_frontier.py --tiny           # a minute on a CPU
"""

import dataclasses
import pathlib
import time
from collections.abc import Iterator

import benchmark_parity
import tyro
from benchmark_parity import EXACT

import echo_jax as echo
from echo_jax import evaluation, models
from echo_jax.config import Backend
from echo_jax.records import RecordWriter

Plans = Iterator[tuple[str, echo.DepthPlan]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    model: pathlib.Path | None = None  # GGUF file, or folder with safetensors
    questions: pathlib.Path = pathlib.Path("questions.npz")  # benchmark_questions.py's
    block_sizes: tuple[int, ...] = (64, 32, 128)
    widths: tuple[int, ...] = (3, 4, 6, 8)  # that plans choose from
    budgets: tuple[float, ...] = (3.75, 4.0, 4.25, 4.5, 4.65, 4.8, 5.0, 5.5, 6.0)
    searched: tuple[float, ...] = (4.5, 4.65)  # budgets that search gets
    search_seconds: float = 30.0  # for each of them
    ranks: int = 3  # simulated
    # Of parameters, computation and partial sums; bfloat16's own rounding would hide
    # small divergences.
    dtype: str = "float32"
    precision: str = "highest"  # of matrix products
    backend: Backend = "xla"  # of the codec; needs nothing but JAX
    windows: int = 128  # of prose
    window: int = 512  # tokens that are predicted in each
    calibration: int = 16  # windows that plans are made on
    prose_batch: int = 16  # windows at a time
    plans: pathlib.Path | None = None  # folder for the plans that were made, as JSON
    out: pathlib.Path = benchmark_parity.RESULTS
    tiny: bool = False  # a random model, made-up tokens


def config_of(settings: Settings, block_size: int, bits: int = 4, **kinds):
    fmt = echo.WireFormat(bits=bits, block_size=block_size)
    return echo.EchoConfig(format=fmt, min_bytes=0, backend=settings.backend, **kinds)


def fixed_plans(settings: Settings, block_size: int) -> Plans:
    """Plans that need no measurement."""
    uniform, edges = echo.DepthPlan.uniform, echo.DepthPlan.edges
    for bits in settings.widths:
        config = config_of(settings, block_size, bits)
        yield "uniform", uniform(config)
        yield "uniform, exact last", uniform(config, exact_final=True)
        plain = config_of(settings, block_size, bits, feedback=False)
        yield "no feedback", uniform(plain)
    four = config_of(settings, block_size)
    for first, last in ((0, 1), (1, 1), (2, 1), (2, 2), (3, 1)):
        yield f"edges {first} {last}", edges(four, first=first, last=last)
    yield "edges 2 1, exact last", edges(four, exact_final=True)
    yield "edges 2 1, 3 bits between", edges(config_of(settings, block_size, 3))
    yield "edges 2 1, 6 bits", edges(four, edge_bits=6)


def measured_plans(
    settings: Settings, block_size: int, sensitivities: dict, calibrating
) -> Plans:
    """Plans by sensitivity, and what search makes of them."""
    four = config_of(settings, block_size)
    from_sensitivity = echo.DepthPlan.from_sensitivity
    cheapest = min(settings.widths) + 16 / block_size
    for budget in settings.budgets:
        if budget < cheapest:
            continue
        for name, sensitivity in sensitivities.items():
            kinds = {"bits": budget, "widths": settings.widths}
            plan = from_sensitivity(sensitivity, four, **kinds)
            yield f"sensitivity{name}", plan
            if not name and budget in settings.searched:
                yield "searched", search(settings, plan, budget, calibrating)


def search(settings: Settings, plan: echo.DepthPlan, budget: float, calibrating):
    def report(rounds: int, divergence: float) -> None:
        print(f"  round {rounds}: calibration KL {divergence:.5f}", flush=True)

    return evaluation.refine_plan(
        calibrating,
        plan,
        bits=budget,
        widths=settings.widths,
        seconds=settings.search_seconds,
        progress=report,
    )


def run_block_size(
    settings: Settings, model, windows: tuple, block_size: int, writer: RecordWriter
) -> None:
    """Every plan of one block size: they share their programs."""
    fixed = list(fixed_plans(settings, block_size))
    possible = [plan for _, plan in fixed]
    calibrating, judging = (
        evaluation.Prose(
            model,
            part,
            exact_plan=EXACT,
            plans=possible,
            batch=min(settings.prose_batch, len(part)),
        )
        for part in windows
    )
    wanted = judging.measure(EXACT)
    sensitivities = {
        name: models.measure_sensitivity(
            model,
            windows[0][:, :-1],
            config=config_of(settings, block_size, feedback=not name),
        )
        for name in ("", ", no feedback")
    }
    measured = measured_plans(settings, block_size, sensitivities, calibrating)
    for name, plan in (*fixed, *measured):
        plan = plan.bind(model.config.num_calls)
        write_plan(settings, model, name, plan, judging.measure(plan), wanted, writer)


def write_plan(settings, model, name, plan, found, wanted, writer) -> None:
    """Divergence and loss of one plan, on a line and in the file."""
    config = benchmark_parity.describe(settings, model, name, plan)
    config["frontier"] = True
    config["calls"] = [0 if c.is_exact else c.format.bits for c in plan]
    config["tokens"] = settings.windows * settings.window
    kl, error = evaluation.mean_of(found.divergence)
    gap, gap_error = evaluation.mean_of(
        100 * (found.loss - wanted.loss) / wanted.loss.mean()
    )
    write = benchmark_parity.write
    write(writer, "logit_kl", kl, "nats", config, error)
    write(writer, "loss_gap_percent", gap, "%", config, gap_error)
    write(writer, "top1_agreement", found.agreement.mean(), "1", config)
    print(
        f"block {config['block_size']:3} {plan.average_bits:5.2f} bits  KL {kl:.4f} +- "
        f"{error:.4f}  loss {gap:+.2f} %  {name}",
        flush=True,
    )
    if settings.plans is not None:
        settings.plans.mkdir(parents=True, exist_ok=True)
        stem = f"{name}-{config['block_size']}-{plan.average_bits:.2f}"
        path = settings.plans / f"{stem.replace(' ', '_').replace(',', '')}.json"
        plan.save(path, model=config["model"], axis_size=model.ranks)


def shrink(settings: Settings) -> Settings:
    return dataclasses.replace(
        settings,
        model=benchmark_parity.TINY_MODEL,
        block_sizes=(32,),
        budgets=(4.5,),
        searched=(4.5,),
        search_seconds=2.0,
        dtype="float32",
        ranks=2,
        windows=2,
        window=16,
        calibration=1,
    )


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        settings = shrink(settings)
    start = time.perf_counter()
    model, windows = benchmark_parity.open_prose(settings)
    writer = RecordWriter(settings.out)
    for block_size in settings.block_sizes:
        run_block_size(settings, model, windows, block_size, writer)
        print(f"{time.perf_counter() - start:.1f} s so far", flush=True)


if __name__ == "__main__":
    main()
