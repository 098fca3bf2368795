"""Does a decoder trained with 4-bit sums end where one with exact sums ends?

Trains a decoder in bfloat16 on prepared text, its tensor-parallel ranks simulated on
one device by ``vmap``, the code path of shard_map: exact sums, 4 bits both ways, 4 bits
forward alone, without feedback, 3 bits, 8 bits at the ends. Same parameters, same text
in the same order, same schedule. All are compared with the exact run on the same
held-out batches at the same step; the longest comparison of each is its result. What a
run has learned is at the end read with other sums too, exact ones among them: the
rest of its gap is of reading alone.

    echo-jax prepare books.txt.xz --out books --vocab-size 16384
    python experiments/train_parity.py --data books --work runs/parity --minutes 9
    python experiments/train_parity.py --tiny        # under a minute on a CPU

A run that the time was too short for goes on when the command is given again: its
checkpoints are in ``--work``. Several devices share the work if each is given variants
of its own and the same ``--work``. Results are appended with ``--summarize``, as far as
the runs have come, or when every variant there is complete.
"""

import dataclasses
import json
import pathlib
import statistics
import tempfile
import time
from typing import NamedTuple

import tyro

from echo_jax.config import Backend
from echo_jax.devices import use_compilation_cache, use_cpu_devices
from echo_jax.files import write_text
from echo_jax.layers.attention_kernel import AttentionChoice
from echo_jax.models import DecoderConfig
from echo_jax.records import Record, RecordWriter, origin_of
from echo_jax.training import (
    CheckpointConfig,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    PrepareConfig,
    RunResult,
    TrainConfig,
    TrainingRun,
    prepare,
    write_corpus,
)
from echo_jax.training import data as text_data
from echo_jax.training.corpus import Manifest
from echo_jax.training.metrics import matrix_parameters
from echo_jax.training.report import read_curves
from echo_jax.training.result import gap_percent, gap_spread_percent
from echo_jax.wire import WireFormat

RESULTS = pathlib.Path(__file__).parent / "results" / "train_parity.jsonl"

# What each run is called: its all-reduces and their bits.
RUNS = {
    "exact": ("exact", 4),
    "echo": ("echo", 4),
    "forward-only": ("forward-only", 4),
    "no-feedback": ("no-feedback", 4),
    "echo-3bit": ("echo", 3),
    "edges": ("edges", 4),
}
MAIN = ("exact", "echo")
READING = ("exact", "echo", "edges")  # sums that read what a run has learned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained, and for how long."""

    data: pathlib.Path | None = None  # what echo-jax prepare wrote
    work: pathlib.Path = pathlib.Path("runs/parity")  # checkpoints and curves
    variants: tuple[str, ...] = tuple(RUNS)
    tokens: int = 300_000_000  # of the exact and the 4-bit run; sets the schedule
    other_tokens: int = 100_000_000  # of the others, which stop on the way
    evaluate_tokens: int = 25_000_000  # between two held-out losses
    minutes: float | None = None  # stop in time to save; None: when all is done
    layers: int = 8
    width: int = 512
    ranks: int = 8  # simulated
    batch_size: int = 64  # sequences in a step
    length: int = 512  # tokens in a sequence
    heldout_batches: int = 16
    steps_per_call: int = 20  # on the device, before it reports
    learning_rate: float = 2e-3
    backend: Backend = "auto"
    attention: AttentionChoice = "auto"
    unroll: int = 1  # layers in one iteration of the loop over them
    seed: int = 0
    out: pathlib.Path = RESULTS
    summarize: bool = False  # train nothing, write what there is
    tiny: bool = False  # a small model on Python's source, a few steps

    def __post_init__(self):
        unknown = set(self.variants) - set(RUNS)
        if unknown:
            raise SystemExit(f"variants are of {', '.join(RUNS)}")
        if self.heldout_batches < 2:
            raise SystemExit("a spread needs at least two held-out batches")

    @property
    def tokens_a_step(self) -> int:
        return self.batch_size * self.length

    def steps(self, tokens: int) -> int:
        """As many steps as hold these tokens, a multiple of those of a call."""
        call = self.tokens_a_step * self.steps_per_call
        return max(1, round(tokens / call)) * self.steps_per_call

    def target(self, name: str) -> int:
        """The last step of a run."""
        return self.steps(self.tokens if name in MAIN else self.other_tokens)

    def milestones(self, name: str) -> list[int]:
        """Steps at which a run is compared."""
        every, last = self.steps(self.evaluate_tokens), self.target(name)
        others = self.steps(self.other_tokens)
        # Nothing close before the end: a few steps have no speed worth printing.
        on_the_way = range(every, last - every // 2, every)
        return sorted({*on_the_way, min(others, last), last})

    def config(self, name: str, vocab_size: int) -> TrainConfig:
        """What ``echo-jax train`` would be told."""
        variant, bits = RUNS[name]
        log_every = 5 * self.steps_per_call
        return TrainConfig(
            model=DecoderConfig(
                vocab_size=vocab_size,
                num_layers=self.layers,
                width=self.width,
                num_heads=8,
                num_kv_heads=8,
                head_dim=self.width // 8,
                mlp_width=3 * self.width,
                dtype="bfloat16",
                attention=self.attention,
                unroll=self.unroll,
            ),
            data=DataConfig(
                path=self.data,
                batch_size=self.batch_size,
                length=self.length,
                heldout_batches=self.heldout_batches,
            ),
            optimizer=OptimizerConfig(
                learning_rate=self.learning_rate,
                schedule="wsd",
                warmup=0.02,
                final=0.0,
            ),
            mesh=MeshConfig(data_ranks=1, tensor_ranks=self.ranks, simulated=True),
            # Stopping saves as well; these are for a machine that is taken away.
            checkpoint=CheckpointConfig(every=25 * log_every, keep=2),
            format=WireFormat(bits=bits),
            variants=(variant,),
            steps=self.steps(self.tokens),
            steps_per_call=self.steps_per_call,
            log_every=log_every,
            backend=self.backend,
            seed=self.seed,
        )


def train(settings: Settings, name: str, deadline: float) -> bool:
    """Goes on with one run; whether it is complete."""
    folder, target = settings.work / name, settings.target(name)
    found = heldout(settings, name)

    def missing() -> list[str]:
        read = {RUNS[name][0], *found.read_with.get(target, ())}
        return [sums for sums in READING if sums not in read]

    def is_complete() -> bool:
        return target in found.by_step and not missing()

    if is_complete() or time.time() > deadline:
        return is_complete()
    corpus = Manifest.load(settings.data)
    runs = prepare(settings.config(name, corpus.vocab_size))
    writer = RecordWriter(folder / "metrics.jsonl")
    run = TrainingRun(runs, RUNS[name][0], writer=writer, resume=True)
    print(f"{name}: from step {run.steps_done} to {target}", flush=True)
    if run.steps_done > target:
        run.close()
        raise SystemExit(f"{folder} is at step {run.steps_done}, past {target}")
    for milestone in settings.milestones(name):
        # Of a step that was measured the checkpoint may have been lost.
        if milestone < run.steps_done:
            continue
        if milestone == run.steps_done and milestone in found.by_step:
            continue
        run.train(
            lambda variant, step, loss: None,
            lambda last=milestone: run.steps_done >= last or time.time() > deadline,
        )
        if run.steps_done < milestone:
            break
        losses = found.by_step[milestone] = run.heldout_losses()
        found.save(folder, corpus)
        speed = run.result.tokens_per_second or 0
        print(
            f"{name}: step {milestone}, held-out {statistics.fmean(losses):.4f}, "
            f"{speed:,.0f} tokens/s",
            flush=True,
        )
    for sums in missing() if run.steps_done == target else ():
        if time.time() > deadline:
            break
        losses = run.heldout_losses(runs.config.plan(sums))
        found.read_with.setdefault(target, {})[sums] = losses
        found.save(folder, corpus)
    run.close()
    return is_complete()


class Heldout(NamedTuple):
    """The held-out losses of a run, batch by batch."""

    by_step: dict[int, list[float]]
    read_with: dict[int, dict[str, list[float]]]  # at its last step, with other sums

    def save(self, folder: pathlib.Path, corpus: Manifest) -> None:
        """Keeps it beside the run's other files."""
        content = {
            "corpus": corpus.checksum,
            "losses": self.by_step,
            "read_with": self.read_with,
        }
        write_text(folder / "heldout.json", json.dumps(content))


def heldout(settings: Settings, name: str) -> Heldout:
    """What was measured, as far as a run has come."""
    path = settings.work / name / "heldout.json"
    if not path.exists():
        return Heldout({}, {})
    content = json.loads(path.read_text())
    if content["corpus"] != Manifest.load(settings.data).checksum:
        raise SystemExit(f"{path} is of another text than {settings.data}")
    by_step, read_with = (
        {int(step): losses for step, losses in content.get(key, {}).items()}
        for key in ("losses", "read_with")
    )
    return Heldout(by_step, read_with)


def summarize(settings: Settings) -> None:
    """Appends what the runs have come to: curves, last losses, gaps to exact."""
    exact = heldout(settings, "exact").by_step
    if not exact:
        raise SystemExit(f"{settings.work} holds no exact run to compare with")
    corpus = Manifest.load(settings.data)
    for name in settings.variants:
        measured, read_with = heldout(settings, name)
        if not measured:
            print(f"{name:13} has not come to its first held-out loss")
            continue
        # Runs may have been made elsewhere; those of a few steps have no records.
        path = settings.work / name / "metrics.jsonl"
        origin = origin_of(path) if path.exists() else None
        writer = RecordWriter(settings.out, origin=origin)
        write_curves(settings, writer, name, corpus)
        for step in sorted(set(measured) & set(exact)):
            loss = statistics.fmean(measured[step])
            figures = [("heldout_loss", loss, "nats", None, None)]
            if name != "exact":
                figures.append(gap_figure("heldout_gap", measured[step], exact[step]))
            for figure in figures:
                write(settings, writer, name, step, corpus, figure)
            for sums, losses in read_with.get(step, {}).items():
                figure = gap_figure("reading_gap", losses, exact[step])
                write(settings, writer, name, step, corpus, figure, reading=sums)


def gap_figure(name: str, losses: list[float], exact: list[float]) -> tuple:
    """How far losses are above those of the exact run on the same batches."""
    result = RunResult(variant="echo", heldout=losses)
    baseline = RunResult(variant="exact", heldout=exact)
    value = gap_percent(result, baseline)
    spread = gap_spread_percent(result, baseline)
    return f"{name}_percent", value, "%", spread, "exact"


def write_curves(settings: Settings, writer, name: str, corpus: Manifest) -> None:
    """A hundred points of the training loss, and the median speed."""
    path = settings.work / name / "metrics.jsonl"
    losses = read_curves(path, "train_loss")
    for curve in losses.values():
        steps = [*curve][:: max(1, len(curve) // 100)]
        for step in steps:
            figure = ("train_loss", curve[step], "nats", None, None)
            write(settings, writer, name, step, corpus, figure)
    for metric in ("tokens_per_second", "flops_per_second"):
        for curve in read_curves(path, metric).values():
            values = sorted(curve.values())
            median, last = values[len(values) // 2], max(curve)
            figure = (metric, median, "1/s", None, None)
            write(settings, writer, name, last, corpus, figure)


def write(
    settings, writer, name: str, step: int, corpus: Manifest, figure: tuple, **more: str
) -> None:
    metric, value, unit, spread, baseline = figure
    if baseline is not None:
        told = " ".join([name, *(f"read with {sums}" for sums in more.values())])
        print(f"{told:34} step {step:6} {value:+.3f} +- {spread:.3f} %")
    model = settings.config(name, corpus.vocab_size).model
    embedding = 0 if model.tied_embeddings else model.vocab_size * model.width
    variant, bits = RUNS[name]
    writer.write(
        Record(
            experiment="train_parity",
            metric=metric,
            value=value,
            unit=unit,
            spread=spread,
            baseline=baseline,
            seed=settings.seed,
            config={
                "variant": name,
                "plan": variant,
                "bits": None if variant == "exact" else bits,
                "step": step,
                "tokens": step * settings.tokens_a_step,
                "schedule_tokens": settings.steps(settings.tokens)
                * settings.tokens_a_step,
                "parameters": matrix_parameters(model) + embedding,
                "layers": settings.layers,
                "width": settings.width,
                "ranks": settings.ranks,
                "batch_tokens": settings.tokens_a_step,
                "length": settings.length,
                "vocab_size": corpus.vocab_size,
                "corpus": corpus.checksum[:12],
                "backend": settings.backend,
                "attention": settings.attention,
                "unroll": settings.unroll,
                "learning_rate": settings.learning_rate,
                **more,
            },
        )
    )


def tiny(settings: Settings, folder: pathlib.Path) -> Settings:
    """A minute on a CPU, on Python's own source."""
    use_cpu_devices(1)
    text = text_data.read_text(None)[: 300 << 10].tobytes().decode(errors="ignore")
    (folder / "text.txt").write_text(text)
    prepared = PrepareConfig(vocab_size=320, heldout_every=4)
    write_corpus(folder / "text.txt", folder / "data", config=prepared)
    return dataclasses.replace(
        settings,
        data=folder / "data",
        work=folder / "work",
        variants=("exact", "echo", "no-feedback"),
        tokens=512,
        other_tokens=256,
        evaluate_tokens=128,
        layers=1,
        width=64,
        ranks=2,
        batch_size=2,
        length=32,
        heldout_batches=2,
        steps_per_call=2,
    )


def main(settings: Settings) -> None:
    start = time.time()
    deadline = start + 60 * (settings.minutes or 1e9)
    use_compilation_cache(settings.work / "programs")
    if not settings.summarize:
        complete = [train(settings, name, deadline) for name in settings.variants]
        if not all(complete):
            missing = [
                name
                for name, done in zip(settings.variants, complete, strict=True)
                if not done
            ]
            print(f"the time is over; not complete: {', '.join(missing)}")
            return
        if set(settings.variants) != set(RUNS) and not settings.tiny:
            print("complete; --summarize writes the results")
            return
    summarize(settings)


if __name__ == "__main__":
    chosen = tyro.cli(Settings, description=__doc__)
    if chosen.tiny:
        with tempfile.TemporaryDirectory() as scratch:
            main(tiny(chosen, pathlib.Path(scratch)))
    elif chosen.data is None:
        raise SystemExit("give --data, a folder that echo-jax prepare wrote")
    else:
        main(chosen)
