"""The main job over several seeds: is the gap between variants larger than its noise?

Runs ``echo-jax train`` at its default size for each seed and records the final losses
of every run, then the mean gap to the exact run and its spread over seeds. Seeds that
the file holds already are not run again.

    python experiments/train_seeds.py            # ten minutes and more on two CPU cores
    python experiments/train_seeds.py --variants exact echo --bits 3
    python experiments/train_seeds.py --tiny     # seconds, for CI
"""

import dataclasses
import pathlib
import statistics
import sys

import tyro

from echo_jax.devices import use_cpu_devices
from echo_jax.records import Record, RecordWriter, read_records
from echo_jax.training import DataConfig, TrainConfig, compare, prepare
from echo_jax.training.loop import gap_percent

RESULTS = pathlib.Path(__file__).parent / "results" / "train_seeds.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    config: tyro.conf.OmitArgPrefixes[TrainConfig] = TrainConfig()
    out: pathlib.Path = RESULTS
    tiny: bool = False  # one layer, two seeds, two steps


class SummaryWriter(RecordWriter):
    """Leaves out the losses of single steps."""

    def write(self, record: Record) -> None:
        if "step" not in record.config:
            renamed = dataclasses.replace(record, experiment="train_seeds")
            super().write(renamed)


def finished(settings: Settings) -> dict[str, dict[int, float]]:
    """The gaps that the file holds already: by variant, then by seed."""
    gaps: dict[str, dict[int, float]] = {}
    if not settings.out.exists():
        return gaps
    for record in read_records(settings.out):
        config = record["config"]
        same = config["steps"] == settings.config.steps
        model = config.get("model")  # the means over seeds have none
        same = same and model == dataclasses.asdict(settings.config.model)
        same = same and config["format"]["bits"] == settings.config.format.bits
        if same and record["metric"] == "heldout_gap_percent":
            gaps.setdefault(config["variant"], {})[record["seed"]] = record["value"]
    return gaps


def run(settings: Settings, seed: int, writer: RecordWriter) -> None:
    """Every variant of one seed; leaves the program if the user stops it."""
    config = dataclasses.replace(settings.config, seed=seed)
    results, stopped = compare(prepare(config), writer, progress=lambda *_: None)
    for result in results:
        gap = gap_percent(result, results[0])
        if gap is not None:
            print(
                f"seed {seed} {result.variant:12} held-out {result.heldout_loss:.4f} "
                f"gap {gap:+.2f} %",
                flush=True,
            )
    if stopped:
        sys.exit(130)


def summarize(settings: Settings, writer: RecordWriter) -> None:
    """Means and spreads over the seeds, from the file."""
    gaps = finished(settings)
    for variant, by_seed in gaps.items():
        values = [by_seed[seed] for seed in settings.seeds]
        write_mean(settings, writer, "mean_heldout_gap_percent", variant, values)
    if {"echo", "no-feedback"} <= set(gaps):
        won = [gaps["no-feedback"][s] - gaps["echo"][s] for s in settings.seeds]
        write_mean(settings, writer, "mean_gain_of_feedback_percent", "echo", won)


def write_mean(settings, writer, metric: str, variant: str, values: list[float]):
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    print(f"{metric:30} {variant:12} {mean:+.2f} +- {spread:.2f} %")
    writer.write(
        Record(
            experiment="train_seeds",
            metric=metric,
            value=mean,
            unit="%",
            spread=spread,
            baseline="no-feedback" if "gain" in metric else "exact",
            config={
                "variant": variant,
                "seeds": list(settings.seeds),
                "bits": settings.config.format.bits,
                "steps": settings.config.steps,
                "layers": settings.config.model.num_layers,
            },
        )
    )


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        small = dataclasses.replace(
            settings.config,
            steps=2,
            model=dataclasses.replace(settings.config.model, num_layers=1),
            data=DataConfig(batch_size=2, length=32, heldout_batches=2),
        )
        settings = dataclasses.replace(settings, seeds=(0, 1), config=small)
    if len(settings.seeds) < 2 or settings.config.variants[0] != "exact":
        raise SystemExit("give at least two --seeds, and exact as the first variant")
    use_cpu_devices(settings.config.mesh.size)
    writer = SummaryWriter(settings.out)
    complete = [set(by_seed) for by_seed in finished(settings).values()]
    compared = len(settings.config.variants) - 1
    done = set.intersection(*complete) if len(complete) == compared else set()
    for seed in settings.seeds:
        if seed in done:
            print(f"seed {seed} is in {settings.out} already")
        else:
            run(settings, seed, writer)
    summarize(settings, writer)


if __name__ == "__main__":
    main()
