"""Do ranks on devices of their own train as simulated ones do, and stay the same?

Trains a decoder for some steps on tensor-parallel ranks simulated on one device, then
on as many devices, from the same parameters on the same text, with sums in 4 bits and
with exact ones. Recorded are the largest difference of the losses, the distance from a
simulated run with exact sums as a scale, and how many of the parameters that every rank
holds differ between ranks in any bit. These must be none; the losses need not agree: a
sum that differs in its last bit can fall to another code, and training widens what
differs. For the variant ``exact`` the scale is the distance of two runs of one program:
zero on a CPU; a GPU may add in another order each time, unless XLA_FLAGS has
--xla_gpu_deterministic_ops=true.

    python experiments/device_training.py            # all devices of one host
    python experiments/device_training.py --tiny     # two CPU devices, for CI
"""

import dataclasses
import os
import pathlib
import tempfile

import jax
import numpy as np
import tyro

from echo_jax.config import Backend
from echo_jax.devices import use_cpu_devices
from echo_jax.layers.attention_kernel import AttentionChoice
from echo_jax.models import DecoderConfig
from echo_jax.records import Record, RecordWriter
from echo_jax.training import (
    CheckpointConfig,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
    TrainingRun,
    prepare,
)
from echo_jax.training.config import Variant

RESULTS = pathlib.Path(__file__).parent / "results" / "device_training.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is trained."""

    ranks: int | None = None  # all devices, unless given
    variants: tuple[Variant, ...] = ("echo", "exact")
    steps: int = 50
    layers: int = 8
    width: int = 512
    batch_size: int = 8  # sequences in a step
    length: int = 512  # bytes of text in a sequence
    learning_rate: float = 1e-3  # at much higher ones any rounding parts two runs
    dtype: str = "bfloat16"  # of computation and partial sums
    backend: Backend = "auto"
    attention: AttentionChoice = "auto"
    seed: int = 0
    out: pathlib.Path = RESULTS
    tiny: bool = False  # one small layer, two steps

    def config(self, *, simulated: bool) -> TrainConfig:
        """What ``echo-jax train`` would be told."""
        return TrainConfig(
            model=DecoderConfig(
                num_layers=self.layers,
                width=self.width,
                num_heads=8,
                num_kv_heads=8,
                head_dim=self.width // 8,
                mlp_width=3 * self.width,
                dtype=self.dtype,
                attention=self.attention,
            ),
            data=DataConfig(
                batch_size=self.batch_size, length=self.length, heldout_batches=1
            ),
            mesh=MeshConfig(
                data_ranks=1, tensor_ranks=self.ranks or 1, simulated=simulated
            ),
            optimizer=OptimizerConfig(learning_rate=self.learning_rate),
            checkpoint=CheckpointConfig(every=0),
            steps=self.steps,
            backend=self.backend,
            seed=self.seed,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run left."""

    losses: np.ndarray  # of every step
    tokens_per_second: float
    replicated: int  # parameters that every rank holds
    differing: int  # of these, how many have other bits on some rank


def train(settings: Settings, variant: Variant, *, simulated: bool) -> Trained:
    """All steps of one run."""
    config = settings.config(simulated=simulated)
    with tempfile.TemporaryDirectory() as folder:
        writer = RecordWriter(pathlib.Path(folder, "metrics.jsonl"))
        with TrainingRun(prepare(config), variant, writer=writer) as run:
            run.train(lambda *_: None, lambda: False)
            replicas = [copies(leaf) for leaf in jax.tree.leaves(run.state.params)]
    replicas = [found for found in replicas if len(found) > 1]
    differ = [any((c != found[0]).any() for c in found[1:]) for found in replicas]
    return Trained(
        losses=np.array(run.result.losses),
        tokens_per_second=run.result.tokens_per_second or float("nan"),
        replicated=len(replicas),
        differing=sum(differ),
    )


def copies(array: jax.Array) -> list[np.ndarray]:
    """The bytes on each device of an array that is whole on every one."""
    if not array.is_fully_replicated:
        return []
    shards = (np.ascontiguousarray(s.data) for s in array.addressable_shards)
    return [shard.reshape(-1).view(np.uint8) for shard in shards]


def compare(settings: Settings, writer: RecordWriter) -> None:
    """Runs, prints and records everything."""
    chosen = dataclasses.asdict(settings)
    for name in ("out", "seed", "tiny", "variants"):
        del chosen[name]

    def write(metric, value, unit, variant, baseline=None, **more):
        flags = os.environ.get("XLA_FLAGS", "")
        config = {**chosen, "xla_flags": flags, "variant": variant, **more}
        writer.write(
            Record(
                experiment="device_training",
                metric=metric,
                value=value,
                unit=unit,
                baseline=baseline,
                seed=settings.seed,
                config=config,
            )
        )

    exact = train(settings, "exact", simulated=True).losses
    for variant in settings.variants:
        alone = train(settings, variant, simulated=True)
        spread = train(settings, variant, simulated=False)
        apart = percent(spread.losses, alone.losses)
        print(
            f"{variant}: devices at most {apart:.4f} % from simulated ranks, exact "
            f"{percent(exact, alone.losses):.4f} %; {spread.differing} of "
            f"{spread.replicated} replicated parameters differ between ranks",
            flush=True,
        )
        write("largest_loss_difference_percent", apart, "%", variant, "simulated")
        distance = percent(exact, alone.losses)
        write("distance_of_exact_percent", distance, "%", variant, "simulated")
        write(
            "differing_replicas", spread.differing, "1", variant, of=spread.replicated
        )
        for kind, run in (("devices", spread), ("simulated", alone)):
            write("tokens_per_second", run.tokens_per_second, "1/s", variant, kind=kind)


def percent(losses: np.ndarray, others: np.ndarray) -> float:
    """The largest relative difference of two curves."""
    return float(100 * np.max(np.abs(losses - others) / others))


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        use_cpu_devices(2)
        settings = dataclasses.replace(
            settings,
            variants=("echo",),
            steps=2,
            layers=1,
            width=64,
            batch_size=1,
            length=32,
        )
    settings = dataclasses.replace(settings, ranks=settings.ranks or jax.device_count())
    compare(settings, RecordWriter(settings.out))


if __name__ == "__main__":
    main()
