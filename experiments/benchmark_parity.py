"""What do 4-bit sums cost a real model, on ten benchmarks and on prose?

Scores SmolLM2-135M (or any checkpoint) under several plans on whole sets, with the
tensor-parallel ranks simulated on one device, and takes differences question by
question. ``benchmark_questions.py`` makes the file of questions. What was scored is
kept in --scores; a run that was cut goes on from there.

    python experiments/benchmark_parity.py --model MODEL    # minutes on an H200
    python experiments/benchmark_parity.py --tiny           # a minute on a CPU, for CI
"""

import dataclasses
import hashlib
import json
import pathlib
import tempfile
import time
from collections.abc import Sequence

import jax
import numpy as np
import tyro
from benchmark_questions import tiny_questions
from jax.sharding import AxisType

import echo_jax as echo
from echo_jax import evaluation, models
from echo_jax.config import Backend
from echo_jax.evaluation.sets import SETS, SEVEN
from echo_jax.models.generation import bytes_per_token
from echo_jax.models.switched import unconditional
from echo_jax.records import Record, RecordWriter

ROOT = pathlib.Path(__file__).parent
RESULTS = ROOT / "results" / "benchmark_parity.jsonl"
TINY_MODEL = ROOT.parent / "tests" / "models" / "fixtures" / "llama_linear"

# Buckets of length; few, since each is compiled.
LENGTHS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 640, 1344)
EXACT = echo.DepthPlan.uniform(echo.EchoConfig(feedback=False).exact())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is scored."""

    model: pathlib.Path | None = None  # GGUF file, or folder with safetensors
    questions: pathlib.Path = pathlib.Path("questions.npz")  # benchmark_questions.py's
    scores: pathlib.Path = pathlib.Path("scores.npz")  # of every request so far
    variants: tuple[str, ...] = ()  # all, if none is named
    plans: tuple[pathlib.Path, ...] = ()  # JSON, each one more variant
    tasks: tuple[str, ...] = tuple(SETS)
    limit: int | None = None  # questions of each set, evenly spaced
    ranks: int = 3  # simulated; heads are padded where they do not divide
    dtype: str = "bfloat16"  # of parameters, computation and partial sums
    precision: str = "default"  # of matrix products
    backend: Backend = "xla"  # of the codec; needs nothing but JAX
    batch_tokens: int = 32_768  # padding included
    windows: int = 128  # of prose
    window: int = 512  # tokens that are predicted in each
    calibration: int = 16  # windows that the sensitivity plan is made on
    prose_batch: int = 16  # windows at a time
    out: pathlib.Path = RESULTS
    tiny: bool = False  # a random model, made-up questions


def config_of(settings: Settings, bits: int = 4, **kinds) -> echo.EchoConfig:
    """Block 64; rotated, with feedback, unless said otherwise."""
    fmt = echo.WireFormat(bits=bits, rotate=kinds.pop("rotate", True))
    return echo.EchoConfig(format=fmt, min_bytes=0, backend=settings.backend, **kinds)


def measure_effects(settings: Settings, calibration: np.ndarray, config):
    """What each call's rounding does to the logits, measured in float32.

    In bfloat16 the model's own rounding hides what a single call does.
    """
    precise = dataclasses.replace(settings, dtype="float32", precision="highest")
    effects = models.measure_sensitivity(
        load_model(precise), calibration, config=config
    )
    jax.config.update("jax_default_matmul_precision", settings.precision)
    return effects


def make_plans(
    settings: Settings, model: models.LoadedModel, calibration: np.ndarray
) -> dict[str, echo.DepthPlan]:
    """Every variant's plan; what shows most comes first."""
    uniform = echo.DepthPlan.uniform
    four = config_of(settings)
    effects = measure_effects(settings, calibration, four)
    plain = config_of(settings, rotate=False, feedback=False)
    plans = {
        "exact": EXACT,
        "edges": echo.DepthPlan.edges(four),
        "sensitivity": echo.DepthPlan.from_sensitivity(effects, four, bits=4.5),
        "uniform": uniform(four),
        "plain": uniform(plain),
        "8-bit": uniform(config_of(settings, 8)),
        "3-bit": uniform(config_of(settings, 3)),
    }
    plans |= {path.stem: echo.DepthPlan.load(path) for path in settings.plans}
    plans = {name: plan.bind(model.config.num_calls) for name, plan in plans.items()}
    print("sensitivity plan:", [call.format.bits for call in plans["sensitivity"]])
    if not settings.variants:
        return plans
    return {name: plans[name] for name in dict.fromkeys(("exact", *settings.variants))}


def describe(
    settings, model: models.LoadedModel, name: str, plan: echo.DepthPlan
) -> dict:
    """The part of a record's ``config`` that says what was sent."""
    body = plan.body
    return {
        "plan": name,
        "bits": body.format.bits if name != "exact" else 16,
        "bits_per_value": plan.average_bits,
        "feedback": body.feedback and name != "exact",
        "rotate": body.format.rotate and name != "exact",
        "block_size": body.format.block_size,
        "ranks": model.ranks,
        "dtype": settings.dtype,
        "precision": settings.precision,
        "model": settings.model.stem if settings.model else "random",
    }


def score_all(
    settings: Settings,
    model: models.LoadedModel,
    plans: dict[str, echo.DepthPlan],
    sets: Sequence[evaluation.Questions],
    report: "Report",
) -> None:
    """The seven sets under every plan, then the rest; nothing saved is run again."""
    scorer = evaluation.Scorer(
        model,
        list(plans.values()),
        batch_tokens=settings.batch_tokens,
        lengths=LENGTHS,
    )
    saved = evaluation.SavedScores(settings.scores)
    for seven in (True, False):
        phase = [questions for questions in sets if (questions.name in SEVEN) == seven]
        for variant, plan in plans.items():
            key = f"{variant}-{report.fingerprint(variant)}"
            missing = [q for q in phase if saved.get(key, q) is None]
            if missing:
                score_sets(scorer, plan, missing, saved, key)
            for questions in phase:
                scores = saved.get(key, questions)
                report.add(variant, questions, questions.grade(scores))
            if seven:
                report.write_mean(variant)


def score_sets(
    scorer: evaluation.Scorer,
    plan: echo.DepthPlan,
    sets: Sequence[evaluation.Questions],
    saved: evaluation.SavedScores,
    key: str,
) -> None:
    """Scores sets together, so that few batches are not full, and saves them."""
    requests = [request for questions in sets for request in questions.requests]
    start = time.perf_counter()
    scorer.compile(requests)
    compiled = time.perf_counter()
    scores = scorer.score(requests, plan, progress=report_progress(key))
    end = time.perf_counter()
    place = 0
    for questions in sets:
        part = slice(place, place + len(questions.requests))
        place = part.stop
        saved.put(key, questions.name, evaluation.Scores(*(s[part] for s in scores)))
    saved.write()
    tokens = sum(len(r.context) + len(r.continuation) for r in requests)
    print(
        f"{key}: {len(requests)} requests, {tokens} tokens in {end - compiled:.1f} s, "
        f"compiled in {compiled - start:.1f} s",
        flush=True,
    )


def report_progress(variant: str):
    """Prints a line every ten seconds."""
    last = [time.perf_counter()]

    def report(done: int, total: int) -> None:
        if time.perf_counter() - last[0] > 10:
            last[0] = time.perf_counter()
            print(f"{variant}: {done} of {total}", flush=True)

    return report


class Report:
    """Writes every figure as soon as it is known; the exact plan's come first."""

    def __init__(self, writer: RecordWriter, configs: dict[str, dict]):
        self.configs, self._writer = configs, writer
        self._right: dict[tuple[str, str], np.ndarray] = {}

    def fingerprint(self, variant: str) -> str:
        """Eight digits that tell scores of other plans, ranks or dtypes apart."""
        text = json.dumps(self.configs[variant], default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def add(self, variant: str, questions, grades: dict[str, np.ndarray]) -> None:
        """Accuracies of one set, and their differences to exact, by question."""
        for metric, values in grades.items():
            is_main = metric == main_metric(questions)
            cell = {
                **self.configs[variant],
                "task": questions.name,
                "scored_by": metric,
                "main": is_main,
                "questions": len(questions),
            }
            self._write("task_accuracy", evaluation.mean_of(100 * values), "%", cell)
            self._right[variant, questions.name, metric] = 100 * values
            if is_main:
                self._right[variant, questions.name] = 100 * values
            wanted = self._right.get(("exact", questions.name, metric))
            if variant != "exact" and wanted is not None:
                found = evaluation.paired_difference(100 * values, wanted)
                self._write("task_diff_points", found, "points", cell)
                if is_main:
                    change = f"{found.mean:+.2f} +- {found.error:.2f}"
                    print(f"  {variant} {questions.name} {change}")

    def write_mean(self, variant: str) -> None:
        """The mean over the seven sets, if all were scored."""
        if any((variant, name) not in self._right for name in SEVEN):
            return
        config = self.configs[variant]
        own = [evaluation.mean_of(self._right[variant, name]) for name in SEVEN]
        total = evaluation.average(own)
        self._write("mean7_accuracy", total, "%", config)
        line = f"{variant}: mean of 7 {total.mean:.2f}"
        if variant != "exact":
            differences = evaluation.average(
                [
                    evaluation.paired_difference(
                        self._right[variant, name], self._right["exact", name]
                    )
                    for name in SEVEN
                ]
            )
            self._write("mean7_diff_points", differences, "points", config)
            line += f", difference {differences.mean:+.2f} +- {differences.error:.2f}"
        print(line, flush=True)

    def _write(self, metric: str, found: evaluation.Estimate, unit: str, config: dict):
        write(self._writer, metric, found.mean, unit, config, found.error)


def main_metric(questions: evaluation.Questions) -> str:
    """The metric that counts in a mean."""
    return "acc" if questions.metric == "greedy" else questions.metric


def write(writer, metric: str, value, unit: str, config: dict, error=None) -> None:
    baseline = "exact" if metric.endswith(("diff_points", "kl", "percent")) else None
    if error is not None and not np.isfinite(error):
        error = None
    writer.write(
        Record(
            experiment="benchmark_parity",
            metric=metric,
            value=float(value),
            unit=unit,
            spread=error,
            baseline=baseline,
            config=config,
        )
    )


def write_prose(
    settings: Settings,
    prose: evaluation.Prose,
    plans: dict[str, echo.DepthPlan],
    configs: dict[str, dict],
    writer: RecordWriter,
) -> None:
    """Divergence, perplexity and agreement of every plan; errors over windows."""
    exact = prose.measure(plans["exact"])
    for variant, plan in plans.items():
        found = prose.measure(plan)
        config = {**configs[variant], "text": "prose"}
        config["tokens"] = settings.windows * settings.window
        loss, _ = evaluation.mean_of(found.loss)
        kl, error = evaluation.mean_of(found.divergence)
        gap = evaluation.mean_of(
            100 * (found.loss / exact.loss.mean() - exact.loss / exact.loss.mean())
        )
        write(writer, "perplexity", np.exp(loss), "1", config)
        write(writer, "logit_kl", kl, "nats", config, error)
        write(writer, "loss_gap_percent", gap.mean, "%", config, gap.error)
        write(writer, "top1_agreement", found.agreement.mean(), "1", config)
        print(
            f"{variant:12} {config['bits_per_value']:5.2f} bits  KL {kl:.4f} +- "
            f"{error:.4f}  loss {gap.mean:+.2f} %  agreement "
            f"{found.agreement.mean():.3f}",
            flush=True,
        )


def shrink(settings: Settings, folder: str) -> Settings:
    return dataclasses.replace(
        settings,
        model=TINY_MODEL,
        scores=pathlib.Path(folder, "scores.npz"),
        dtype="float32",
        ranks=2,
        batch_tokens=64,
        windows=2,
        window=16,
        calibration=1,
        prose_batch=1,
        variants=("edges", "plain"),
    )


def cut_windows(settings: Settings, tokens: np.ndarray):
    """Calibration windows from the start of a text, test windows from the rest."""
    length = settings.window + 1
    wanted = settings.calibration + settings.windows
    found = len(tokens) // length
    if found < wanted:
        raise SystemExit(f"the prose has {found} windows, {wanted} are needed")
    # From all of it: a text's parts differ.
    starts = np.linspace(0, len(tokens) - length, wanted).astype(int)
    windows = np.stack([tokens[start : start + length] for start in starts])
    every = max(1, wanted // settings.calibration)
    calibrating = np.arange(wanted) % every == 0
    calibrating[np.flatnonzero(calibrating)[settings.calibration :]] = False
    return windows[calibrating], windows[~calibrating]


def load_model(settings) -> models.LoadedModel:
    """The model on simulated ranks, and the precision that was asked for."""
    jax.config.update("jax_default_matmul_precision", settings.precision)
    mesh = jax.make_mesh(
        (1,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]
    )
    return models.load(
        settings.model, mesh, dtype=settings.dtype, simulate=settings.ranks
    )


def open_prose(settings):
    """The model, and the windows of prose to calibrate and to judge on.

    With ``settings.tiny`` the tokens are drawn, not read.

    Returns:
      ``(model, (calibration windows, test windows))``.
    """
    if settings.model is None:
        raise SystemExit("give --model: a GGUF file or a folder, or --tiny")
    model = load_model(settings)
    if settings.tiny:
        tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, 200)
    else:
        tokens = evaluation.load_questions(settings.questions)[1]["prose"]
    return model, cut_windows(settings, tokens)


def run(settings: Settings) -> None:
    if settings.model is None:
        raise SystemExit("give --model: a GGUF file or a folder, or --tiny")
    start = time.perf_counter()
    model = load_model(settings)
    if settings.tiny:
        sets, tokens = tiny_questions(model.config.vocab_size)
    else:
        sets, extra = evaluation.load_questions(settings.questions)
        tokens = extra["prose"]
    sets = [questions for questions in sets if questions.name in settings.tasks]
    if settings.limit is not None:
        sets = [questions.limited(settings.limit) for questions in sets]
    calibration, windows = cut_windows(settings, tokens)
    plans = make_plans(settings, model, calibration[:, :-1])
    configs = {
        name: describe(settings, model, name, plan) for name, plan in plans.items()
    }
    print(f"loaded and calibrated in {time.perf_counter() - start:.1f} s", flush=True)
    writer = RecordWriter(settings.out)
    for name, plan in plans.items():
        always = unconditional(plan, len(plan))
        sent = bytes_per_token(model, always, tokens=settings.batch_tokens)
        configs[name] |= {"bytes_per_token": sent, "limit": settings.limit}
        configs[name]["calls"] = [0 if c.is_exact else c.format.bits for c in plan]
        write(writer, "bytes_per_token", sent, "bytes", configs[name])
    prose = evaluation.Prose(
        model,
        windows,
        exact_plan=EXACT,
        plans=list(plans.values()),
        batch=settings.prose_batch,
    )
    write_prose(settings, prose, plans, configs, writer)
    del prose
    score_all(settings, model, plans, sets, Report(writer, configs))
    print(f"done in {time.perf_counter() - start:.1f} s", flush=True)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        with tempfile.TemporaryDirectory() as folder:
            run(shrink(settings, folder))
    else:
        run(settings)


if __name__ == "__main__":
    main()
