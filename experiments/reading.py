"""Is what 4-bit sums cost lost in training, or in reading?

Trains small decoders with exact sums, with 4 bits and with 4 bits without feedback, and
reads the held-out text with each of them through other sums: exact ones, 4 bits at
every call, 8 bits in the first two layers, in the last, in both, and without feedback.
All gaps are to the decoder that was trained and is read with exact sums, on the same
batches. Seeds that the file holds already are not run again.

    python experiments/reading.py          # 20 minutes and more on two CPU cores
    python experiments/reading.py --tiny   # half a minute, for CI
"""

import dataclasses
import itertools
import os
import pathlib
import statistics
from typing import Literal

import tyro

from echo_jax.devices import use_cpu_devices
from echo_jax.models import DecoderConfig
from echo_jax.plan import DepthPlan
from echo_jax.records import Record, RecordWriter, read_records
from echo_jax.training import (
    CheckpointConfig,
    DataConfig,
    RunResult,
    TrainConfig,
    TrainingRun,
    prepare,
)
from echo_jax.training.config import Variant
from echo_jax.training.result import gap_percent, gap_spread_percent

RESULTS = pathlib.Path(__file__).parent / "results" / "reading.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained and read."""

    seeds: tuple[int, ...] = (0, 1)
    trained: tuple[Variant, ...] = ("exact", "echo", "no-feedback")
    read: tuple[Literal["first", "last"] | Variant, ...] = (
        *("exact", "echo", "first", "last", "edges", "no-feedback"),
    )
    layers: int = 8
    steps: int = 200
    out: pathlib.Path = RESULTS
    tiny: bool = False  # one layer, two steps, a few of the sums

    def __post_init__(self):
        if len(self.seeds) < 2:
            raise SystemExit("a spread over seeds needs at least two --seeds")
        if "exact" not in self.trained or "exact" not in self.read:
            raise SystemExit("all is compared with exact sums: --trained and --read")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """What trains and what reads, but for exact sums in both."""
        every = itertools.product(self.trained, self.read)
        return [pair for pair in every if pair != ("exact", "exact")]

    def config(self, seed: int) -> TrainConfig:
        """The main job's, with more layers."""
        config = TrainConfig(
            model=DecoderConfig(num_layers=self.layers),
            checkpoint=CheckpointConfig(every=0),
            steps=self.steps,
            variants=self.trained,
            seed=seed,
        )
        if self.tiny:
            data = DataConfig(batch_size=2, length=32, heldout_batches=2)
            config = dataclasses.replace(config, data=data)
        return config


def plan(config: TrainConfig, sums: str) -> DepthPlan:
    """How the held-out text is read."""
    ends = {"first": (2, 0), "last": (0, 1)}
    if sums not in ends:
        return config.plan(sums)
    first, last = ends[sums]
    bulk = config.plan("echo").body
    return DepthPlan.edges(bulk, first=first, last=last, vocab_bits=config.vocab_bits)


def measure(settings: Settings, seed: int) -> dict[tuple[str, str], RunResult]:
    """Held-out losses, by what trained and what reads."""
    runs, losses = prepare(settings.config(seed)), {}
    for trained in settings.trained:
        # Only their losses are wanted, not the curves that a run writes.
        writer = RecordWriter(pathlib.Path(os.devnull))
        with TrainingRun(runs, trained, writer=writer) as run:
            run.train(lambda *_: None, lambda: False)
            for sums in settings.read:
                heldout = run.heldout_losses(plan(runs.config, sums))
                losses[trained, sums] = RunResult(variant=trained, heldout=heldout)
        print(f"seed {seed}: trained with {trained}", flush=True)
    return losses


def record(settings: Settings, pair: tuple[str, str], metric: str, **figures) -> Record:
    trained, sums = pair
    return Record(
        experiment="reading",
        metric=metric,
        unit="%",
        baseline="exact",
        config={
            "trained": trained,
            "reading": sums,
            "bits": settings.config(0).format.bits,
            "layers": settings.layers,
            "steps": settings.steps,
        },
        **figures,
    )


def finished(settings: Settings) -> dict[int, dict[tuple[str, str], float]]:
    """The gaps that the file holds, by seed and pair."""
    gaps: dict[int, dict[tuple[str, str], float]] = {}
    for found in read_records(settings.out) if settings.out.exists() else ():
        config = found["config"]
        same = (config["layers"], config["steps"]) == (settings.layers, settings.steps)
        if same and found["metric"] == "reading_gap_percent":
            pair = config["trained"], config["reading"]
            gaps.setdefault(found["seed"], {})[pair] = found["value"]
    return gaps


def main(settings: Settings) -> None:
    use_cpu_devices(settings.config(0).mesh.size)
    writer = RecordWriter(settings.out)
    for seed in settings.seeds:
        if set(settings.pairs) <= set(finished(settings).get(seed, ())):
            print(f"seed {seed} is in {settings.out} already")
            continue
        losses = measure(settings, seed)
        exact = losses["exact", "exact"]
        for pair in settings.pairs:
            figures = {
                "value": gap_percent(losses[pair], exact),
                "spread": gap_spread_percent(losses[pair], exact),
            }
            metric = "reading_gap_percent"
            writer.write(record(settings, pair, metric, seed=seed, **figures))
    gaps = finished(settings)
    for pair in settings.pairs:
        values = [gaps[seed][pair] for seed in settings.seeds]
        mean, spread = statistics.fmean(values), statistics.stdev(values)
        print(f"trained {pair[0]:12} read {pair[1]:12} {mean:+.3f} +- {spread:.3f} %")
        metric = "mean_reading_gap_percent"
        writer.write(record(settings, pair, metric, value=mean, spread=spread))


def tiny(settings: Settings) -> Settings:
    """What CI has time for."""
    return dataclasses.replace(
        settings,
        layers=1,
        steps=2,
        trained=("exact", "echo"),
        read=("exact", "last"),
    )


if __name__ == "__main__":
    chosen = tyro.cli(Settings, description=__doc__)
    main(tiny(chosen) if chosen.tiny else chosen)
