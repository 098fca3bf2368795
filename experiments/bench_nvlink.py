"""Tensor-parallel sums over the links of one host: exact against few bits.

On however many devices are there: the all-reduce alone over sizes, pieces, residual
kinds and rotation; then time to first token and training step of a decoder of random
weights. Correctness is checked before anything is timed. The cost of a call is the
median over repetitions of a chain of dependent calls, divided by its length.

    python experiments/bench_nvlink.py                 # ten minutes at most on GPUs
    python experiments/bench_nvlink.py --tiny          # on the CPU, for CI
"""

import dataclasses
import os
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import AxisType, Mesh

import echo_jax as echo
from echo_jax import benchmark
from echo_jax.benchmark import Case
from echo_jax.benchmark_model import random_model
from echo_jax.devices import use_cpu_devices
from echo_jax.models import DecoderConfig
from echo_jax.models.timing import Times
from echo_jax.records import Record, RecordWriter

RESULTS = pathlib.Path(__file__).parent / "results" / "bench_nvlink.jsonl"
AXIS = "tensor"
MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    sizes: tuple[int, ...] = (
        *(MIB >> 4, MIB >> 2, MIB, 4 * MIB, 16 * MIB),
        *(64 * MIB, 256 * MIB, 1024 * MIB, 2048 * MIB),
    )  # bytes of a rank's bfloat16 message
    seconds: float = 420.0  # after which no further measurement is begun
    pieces: tuple[int, ...] = (2, 4, 8, 16)  # that a message is cut into, besides one
    repetitions: int = 7  # of each chain; the median counts
    chain: int = 16  # dependent sums that are timed together; half of large ones
    model_width: int = 4096  # of the decoder
    model_layers: int = 8
    model_lengths: tuple[int, ...] = (2048, 8192)  # tokens in a sequence
    out: pathlib.Path = RESULTS
    tiny: bool = False  # small messages and model on eight CPU devices


def cases(settings: Settings) -> list[Case]:
    """The exact sum first: it is the baseline of the others."""

    def config(bits=4, rotate=True, residual="int8", pieces=1, feedback=True):
        return echo.EchoConfig(
            format=echo.WireFormat(bits=bits, rotate=rotate),
            feedback=feedback,
            min_bytes=0,
            residual_dtype=residual,
            num_chunks=pieces,
        )

    return [
        Case(name="psum bf16"),
        Case(name="default settings", config=echo.EchoConfig()),
        Case(name="4 bits", config=config()),
        Case(name="4 bits, int4 residual", config=config(residual="int4")),
        Case(name="4 bits, not rotated", config=config(rotate=False)),
        Case(name="4 bits, no feedback", config=config(feedback=False)),
        Case(name="8 bits", config=config(bits=8)),
        *(
            Case(name=f"4 bits, {n} pieces", config=config(pieces=n))
            for n in settings.pieces
        ),
    ]


class Clock:
    """Says when the time for new measurements is over."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def over(self) -> bool:
        return time.monotonic() > self.end


def time_sums(settings: Settings, mesh: Mesh, writer: RecordWriter, clock: Clock):
    """Every case at every size, largest messages last."""
    for size in settings.sizes:
        shape, baseline = benchmark.message_shape(size // 2), None
        length = settings.chain if size <= 16 * MIB else max(1, settings.chain // 2)
        x = benchmark.draw_message(mesh, shape, "bfloat16", length)
        for case in cases(settings):
            if clock.over():
                continue
            timed = benchmark.TimedSum(case, mesh, shape, length=length)
            timed(x)
            times = Times.of([timed(x) for _ in range(settings.repetitions)])
            baseline = baseline or ("lax.psum bfloat16", times)
            config = {
                "gpus": mesh.size,
                "xla_flags": os.environ.get("XLA_FLAGS", ""),
                **benchmark.describe(case, shape, mesh.size),
            }
            for record in benchmark.sum_records(
                "bench_nvlink", config, times, baseline
            ):
                writer.write(record)
            ratio = baseline[1].median / times.median
            print(
                f"{size / MIB:9.3f} MiB {case.name:24} {1e3 * times.median:9.4f} ms "
                f"{ratio:6.2f}x",
                flush=True,
            )


def decoder(settings: Settings) -> DecoderConfig:
    width = settings.model_width
    return DecoderConfig(
        vocab_size=32_000 if not settings.tiny else 256,
        num_layers=settings.model_layers,
        width=width,
        num_heads=width // 128 if width >= 1024 else 8,
        num_kv_heads=8,
        head_dim=128 if width >= 1024 else width // 8,
        mlp_width=width * 11 // 4 // 64 * 64,
        dtype="bfloat16",
        remat="save_sums",
    )


def plans() -> dict[str, echo.DepthPlan]:
    config = echo.EchoConfig(residual_dtype="int8")
    return {
        "exact": echo.DepthPlan.uniform(config.exact()),
        "echo": echo.DepthPlan.uniform(config),
        "echo edges": echo.DepthPlan.edges(config),
    }


def time_model(settings: Settings, mesh: Mesh, writer: RecordWriter, clock: Clock):
    """Time to first token, and of a training step, by plan and length."""
    config = decoder(settings)
    model = random_model(config, mesh)
    for length in settings.model_lengths:
        tokens = jnp.asarray(
            np.random.default_rng(0).integers(0, config.vocab_size, (1, length + 1))
        )
        baselines: dict[str, float] = {}
        for name, plan in plans().items():
            runs = {
                "ttft": (model.first_token(plan), tokens[:, :-1]),
                "step": (model.training_step(plan), tokens),
            }
            for metric, (run, batch) in runs.items():
                if clock.over():
                    continue
                jax.block_until_ready(run(model.params, batch))
                times = []
                for _ in range(settings.repetitions):
                    start = time.perf_counter()
                    jax.block_until_ready(run(model.params, batch))
                    times.append((time.perf_counter() - start) * 1e3)
                median = statistics.median(times)
                baseline = baselines.setdefault(metric, median)
                print(
                    f"{metric} of {model.num_parameters / 1e9:.2f} B parameters "
                    f"at {length}: {name:12}{median:9.2f} ms {baseline / median:6.2f}x",
                    flush=True,
                )
                chosen = {
                    "gpus": mesh.size,
                    "plan": name,
                    "parameters": model.num_parameters,
                    "length": length,
                    "background": 0,
                }
                common = {"experiment": "bench_nvlink", "config": chosen}
                writer.write(
                    Record(
                        metric=f"{metric}_ms",
                        value=median,
                        unit="ms",
                        spread=max(times) - min(times),
                        **common,
                    )
                )
                writer.write(
                    Record(
                        metric=f"{metric}_speedup",
                        value=baseline / median,
                        unit="1",
                        baseline="exact",
                        **common,
                    )
                )


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        use_cpu_devices(8)
        settings = dataclasses.replace(
            settings,
            sizes=(MIB >> 4,),
            seconds=60.0,
            repetitions=1,
            chain=2,
            pieces=(2,),
            model_width=64,
            model_layers=1,
            model_lengths=(16,),
        )
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    writer, clock = RecordWriter(settings.out), Clock(settings.seconds)
    benchmark.check_cases(cases(settings), mesh)
    print(f"correct on {mesh.size} x {jax.devices()[0].device_kind}", flush=True)
    time_sums(settings, mesh, writer, clock)
    time_model(settings, mesh, writer, clock)


if __name__ == "__main__":
    main()
