"""The main job over several seeds: is the gap between variants larger than its noise?

Runs ``echo-jax train`` at its default size for each seed and records the final losses
of every run, then the mean gap to the exact run and its spread over seeds.

    python experiments/train_seeds.py            # ten minutes and more on two CPU cores
    python experiments/train_seeds.py --tiny     # a minute, for CI
"""

import dataclasses
import pathlib
import statistics
import sys

import tyro

from echo_jax.cli import use_cpu_devices
from echo_jax.records import Record, RecordWriter
from echo_jax.training import DataConfig, TrainConfig, compare
from echo_jax.training.loop import gap_percent

RESULTS = pathlib.Path(__file__).parent / "results" / "train_seeds.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    config: tyro.conf.OmitArgPrefixes[TrainConfig] = TrainConfig()
    out: pathlib.Path = RESULTS
    tiny: bool = False  # two seeds, two steps


class SummaryWriter(RecordWriter):
    """Leaves out the losses of single steps."""

    def write(self, record: Record) -> None:
        if record.metric != "train_loss":
            renamed = dataclasses.replace(record, experiment="train_seeds")
            super().write(renamed)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        small = dataclasses.replace(
            settings.config,
            steps=2,
            data=DataConfig(batch_size=2, length=32, heldout_batches=2),
        )
        settings = dataclasses.replace(settings, seeds=(0, 1), config=small)
    use_cpu_devices(settings.config.mesh.size)
    writer = SummaryWriter(settings.out)
    gaps: dict[str, list[float]] = {}
    for seed in settings.seeds:
        config = dataclasses.replace(settings.config, seed=seed)
        results, stopped = compare(config, writer, lambda *_: None)
        if stopped:
            sys.exit(130)
        exact = next(r for r in results if r.variant == "exact")
        for result in results:
            gap = gap_percent(result, exact)
            gaps.setdefault(result.variant, []).append(gap)
            print(
                f"seed {seed} {result.variant:12} held-out {result.heldout_loss:.4f} "
                f"gap {gap:+.2f} %",
                flush=True,
            )
    del gaps["exact"]
    for variant, values in gaps.items():
        spread = statistics.stdev(values)
        print(
            f"{variant:12} mean gap {statistics.fmean(values):+.2f} +- {spread:.2f} %"
        )
        writer.write(
            Record(
                experiment="train_seeds",
                metric="mean_heldout_gap_percent",
                value=statistics.fmean(values),
                unit="%",
                spread=spread,
                baseline="exact",
                config={
                    "variant": variant,
                    "seeds": list(settings.seeds),
                    "steps": settings.config.steps,
                    "layers": settings.config.model.num_layers,
                },
            )
        )


if __name__ == "__main__":
    main()
