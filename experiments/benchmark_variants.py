"""What would other wire formats be worth to a real model? KL on prose against bits.

Beside plans of the library's format: blocks of 128 and 32, the two roundings of a sum
in different widths, 5 bits, scales in one byte, and a few large values kept apart. The
sums are computed as they would arrive, without the bytes (``variants/call.py``).
``benchmark_questions.py`` makes the file with the prose.

    python experiments/benchmark_variants.py --model MODEL    # an hour on two cores
    python experiments/benchmark_variants.py --tiny           # seconds

Few tokens are enough: plans are compared on the same windows, and the difference to
the default plan has a standard error over windows of its own.
"""

import dataclasses
import functools
import pathlib
import time

import benchmark_parity
import jax
import numpy as np
import tyro
from jax.sharding import PartitionSpec
from variants.call import Form, Rounding, sum_ranks
from variants.plans import BASELINE, Variant, fixed_variants, measured_variants

from echo_jax import evaluation, models
from echo_jax.models.divergence import compare_streams
from echo_jax.models.switched import run_by_sums
from echo_jax.records import Record, RecordWriter

RESULTS = pathlib.Path(__file__).parent / "results" / "benchmark_variants.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    model: pathlib.Path | None = None  # GGUF file, or folder with safetensors
    questions: pathlib.Path = pathlib.Path("questions.npz")  # benchmark_questions.py's
    only: tuple[str, ...] = ()  # variants whose name contains one of these; else all
    budgets: tuple[float, ...] = (4.5, 4.65)  # of plans by sensitivity
    ranks: int = 3  # simulated
    dtype: str = "float32"  # of parameters, computation and partial sums
    precision: str = "highest"  # of matrix products
    windows: int = 6  # of prose
    # Tokens that are predicted in each; three ranks then have whole tokens each.
    window: int = 510
    calibration: int = 1  # windows that plans are made on
    prose_batch: int = 3  # windows at a time
    effects: pathlib.Path | None = None  # folder that keeps the effects of each call
    out: pathlib.Path = RESULTS
    tiny: bool = False  # a random model, made-up tokens


class Text:
    """Windows of text under exact sums, to compare variants with."""

    def __init__(self, model: models.LoadedModel, windows: np.ndarray, batch: int):
        self._model, whole = model, PartitionSpec()
        compare = model.on_ranks(compare_streams, (whole, whole, whole), whole)
        self._compare, self._programs = jax.jit(compare), {}
        self._batches = np.split(np.asarray(windows, np.int32), len(windows) // batch)
        exact = [[Rounding(bits=0), Rounding()]] * model.config.num_calls
        self._wanted = [self._stream(part, Form(), exact) for part in self._batches]

    def measure(self, form: Form, calls) -> evaluation.prose.Comparison:
        """Means over each window: divergence, loss, agreement, as NumPy arrays."""
        parts = [
            self._compare(
                self._model.params, wanted, self._stream(part, form, calls), part[:, 1:]
            )
            for part, wanted in zip(self._batches, self._wanted, strict=True)
        ]
        columns = zip(*jax.device_get(parts), strict=True)
        return evaluation.prose.Comparison(*map(np.concatenate, columns))

    def _stream(self, windows: np.ndarray, form: Form, calls):
        """The stream behind the last layer; the embedding's sum goes in 8 bits."""
        if form not in self._programs:
            whole = PartitionSpec()
            run = self._model.on_ranks(
                functools.partial(run_variant, form=form), (whole, whole), whole
            )
            self._programs[form] = jax.jit(run)
        first = calls[0] if calls[0][0].bits == 0 else [Rounding(bits=8)] * 2
        told = np.array([first, *calls], np.int32)
        return self._programs[form](self._model.params, windows[:, :-1], told)


def run_variant(decoder, tokens, told, *, form: Form):
    """One rank's pass with sums of one form."""
    sums = functools.partial(sum_ranks, form=form, axis_name=decoder.axis_name)
    return run_by_sums(decoder, tokens, told, sum_ranks=sums, config=form.config)


def measure_effects(settings: Settings, text: Text, form: Form, calls: int):
    """KL ``(calls, 2)`` of each rounding alone in 4 bits, the rest as good as exact."""
    path = settings.effects and settings.effects / f"effects-{form.block_size}.npy"
    if path and path.exists():
        return np.load(path)
    fine = Rounding(bits=16)
    effects = np.zeros((calls, 2))
    for call in range(calls):
        for stage in range(2):
            plan = [[fine, fine] for _ in range(calls)]
            plan[call][stage] = Rounding(bits=4)
            found = text.measure(form, plan).divergence.mean()
            # Rounding may leave a divergence of nothing a little below zero.
            effects[call, stage] = max(0.0, float(found))
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, effects)
    return effects


def write_variant(
    settings: Settings, variant: Variant, found, base, exact_loss, writer
):
    """Divergence, loss, and the difference to the default plan, window by window."""
    config = {
        "plan": variant.name,
        **dataclasses.asdict(variant.form),
        "bits_per_value": variant.bits_per_value,
        "calls": [[rounding.bits for rounding in call] for call in variant.calls],
        # Alike in all calls.
        **{key: getattr(variant.calls[0][0], key) for key in Rounding._fields[1:]},
        "tokens": settings.windows * settings.window,
        "calibrated": variant.calibrated,
        **{key: getattr(settings, key) for key in ("ranks", "dtype", "precision")},
        "model": settings.model.stem if settings.model else "random",
    }

    def write(metric, found, unit, baseline):
        error = found.error if np.isfinite(found.error) else None
        record = Record(
            experiment="benchmark_variants",
            metric=metric,
            value=float(found.mean),
            unit=unit,
            spread=error,
            baseline=baseline,
            config=config,
        )
        writer.write(record)

    kl = evaluation.mean_of(found.divergence)
    gap = evaluation.mean_of(100 * (found.loss - exact_loss) / exact_loss.mean())
    change = evaluation.mean_of(
        100 * (found.divergence - base.divergence) / base.divergence.mean()
    )
    write("logit_kl", kl, "nats", "exact")
    write("loss_gap_percent", gap, "%", "exact")
    write("logit_kl_change_percent", change, "%", BASELINE)
    print(
        f"{variant.bits_per_value:5.3f} bits  KL {kl.mean:.5f} +- {kl.error:.5f}  "
        f"{change.mean:+6.1f} +- {change.error:.1f} %  {variant.name}",
        flush=True,
    )


def shrink(settings: Settings) -> Settings:
    return dataclasses.replace(
        settings,
        model=benchmark_parity.TINY_MODEL,
        only=("graded 3 1, uneven levels", "sensitivity, roundings apart,"),
        budgets=(4.5,),
        ranks=2,
        windows=2,
        window=16,
        prose_batch=1,
    )


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        settings = shrink(settings)
    model, windows = benchmark_parity.open_prose(settings)
    run(settings, model, *windows)


def run(settings: Settings, model: models.LoadedModel, calibrating, judging) -> None:
    """Every variant that was asked for; the default plan is always the first."""
    start, writer = time.perf_counter(), RecordWriter(settings.out)
    calls, width = model.config.num_calls, model.config.width
    text = Text(model, judging, settings.prose_batch)
    exact = [[Rounding(bits=0), Rounding()]] * calls
    exact_loss = text.measure(Form(), exact).loss
    base, calibration = None, Text(model, calibrating, settings.calibration)
    effects = functools.partial(measure_effects, settings, calibration, calls=calls)
    effects = functools.cache(effects)
    made = (
        *fixed_variants(calls, width),
        *measured_variants(effects, settings.budgets, width),
    )
    for name, make in made:
        if base is not None and not any(
            part in name for part in settings.only or ("",)
        ):
            continue
        variant = make()
        found = text.measure(variant.form, variant.calls)
        base = found if base is None else base
        write_variant(settings, variant, found, base, exact_loss, writer)
    print(f"{time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
