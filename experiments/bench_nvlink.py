"""Tensor-parallel sums over the links of one host: exact against few bits.

On however many devices are there: the all-reduce alone over sizes, pieces, residual
kinds and rotation; its codec and its exchanges, each alone; then time to first token
and training step of a decoder of random weights. Large sums and the decoder also while
another process takes a share of the links. Correctness is checked before anything is
timed. The cost of a call is the median over repetitions of a chain of dependent calls,
divided by its length. Settings of XLA and NCCL in the environment are recorded.

    python experiments/bench_nvlink.py                 # ten minutes at most on GPUs
    python experiments/bench_nvlink.py --tiny          # on the CPU, for CI
"""

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import AxisType, Mesh
from links.stages import sent_bytes, stage_seconds
from links.traffic import LinkTraffic

import echo_jax as echo
from echo_jax import benchmark
from echo_jax.benchmark import Case
from echo_jax.benchmark_model import random_model
from echo_jax.devices import use_cpu_devices
from echo_jax.layers.attention_kernel import AttentionChoice
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
        *(MIB >> 4, MIB >> 2, MIB, 4 * MIB, 16 * MIB, 32 * MIB),
        *(64 * MIB, 256 * MIB, 1024 * MIB, 2048 * MIB),
    )  # bytes of a rank's bfloat16 message
    seconds: float = 420.0  # after which no further measurement is begun
    pieces: tuple[int, ...] = (2, 4)  # that a message is cut into, besides one
    only: tuple[str, ...] = ()  # names of the cases, besides psum; none: all of them
    repetitions: int = 7  # of each chain; the median counts
    chain: int = 16  # dependent sums that are timed together; half of large ones
    background: tuple[float, ...] = (0.5, 0.75, 1.0)  # of the links, besides none
    background_from: int = 64 * MIB  # bytes of the smallest message beside traffic
    stage_sizes: tuple[int, ...] = (MIB, 64 * MIB, 1024 * MIB)  # timed by stage
    model_width: int = 4096  # of the decoder
    model_layers: int = 8
    model_lengths: tuple[int, ...] = (2048, 8192)  # tokens in a sequence
    attention: AttentionChoice = "auto"  # of the decoder
    out: pathlib.Path = RESULTS
    tiny: bool = False  # small messages and model on eight CPU devices


def cases(settings: Settings) -> list[Case]:
    """The exact sum first: it is the baseline of the others."""

    def config(bits=4, rotate=True, residual="int8", pieces=1, **fields):
        return echo.EchoConfig(
            format=echo.WireFormat(bits=bits, rotate=rotate),
            min_bytes=0,
            residual_dtype=residual,
            num_chunks=pieces,
            **fields,
        )

    kinds = {
        "4 bits": {},
        "4 bits, int4 residual": {"residual": "int4"},
        "4 bits, not rotated": {"rotate": False},
        "4 bits, no feedback": {"feedback": False},
        "4 bits, one shot": {"algorithm": "one-shot"},
        "4 bits, one shot, not rotated": {"algorithm": "one-shot", "rotate": False},
        "8 bits": {"bits": 8},
    }
    cut = [("4 bits", n) for n in settings.pieces]
    for n in settings.pieces[-1:]:
        cut += [(name, n) for name in kinds if name not in ("4 bits", "8 bits")]
    found = [
        Case(name="psum bf16"),
        Case(name="default settings", config=echo.EchoConfig()),
        *(Case(name=name, config=config(**kind)) for name, kind in kinds.items()),
        *(
            Case(name=f"{name}, {n} pieces", config=config(**kinds[name], pieces=n))
            for name, n in cut
        ),
    ]
    names = {case.name for case in found}
    if not names.issuperset(settings.only):
        raise SystemExit(f"--only takes of {', '.join(sorted(names))}")
    wanted = {found[0].name, *settings.only} if settings.only else names
    return [case for case in found if case.name in wanted]


def flags() -> str:
    """What the environment tells XLA, and NCCL but for its multicast, which is off."""
    of_xla = os.environ.get("XLA_FLAGS", "").split()
    known = ("NCCL_NVLS_ENABLE", "NCCL_VERSION")  # images of CUDA set the version
    of_nccl = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith("NCCL_") and name not in known
    ]
    return " ".join(of_xla + of_nccl)


class Clock:
    """Says when the time for new measurements is over."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def over(self) -> bool:
        return time.monotonic() > self.end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What every measurement needs."""

    settings: Settings
    mesh: Mesh
    writer: RecordWriter
    clock: Clock
    traffic: LinkTraffic

    def levels(self, message_bytes: int) -> tuple[float, ...]:
        """Shares of the links that others take; none first."""
        beside = message_bytes >= self.settings.background_from
        return (0.0, *(self.settings.background if beside else ()))

    @contextlib.contextmanager
    def beside(self, share: float) -> Iterator[dict]:
        """Others take this share; what they took is in the entries afterwards."""
        entries = {"gpus": self.mesh.size, "background": share}
        self.traffic.take(share)
        time.sleep(0.1)
        self.traffic.take(share)
        yield entries
        taken = self.traffic.take(0.0)
        entries["background_bytes_per_second"] = taken.bytes_per_second
        entries["link_bytes_per_second"] = taken.idle_bytes_per_second


def time_sums(run: Run) -> None:
    """Every case at every size, largest messages last."""
    settings = run.settings
    for size in settings.sizes:
        if run.clock.over():
            return
        shape = benchmark.message_shape(size // 2)
        length = settings.chain if size <= 16 * MIB else max(1, settings.chain // 2)
        x = benchmark.draw_message(run.mesh, shape, "bfloat16", length)
        sums = [
            benchmark.TimedSum(case, run.mesh, shape, length=length)
            for case in cases(settings)
        ]
        for timed in sums:
            timed(x)  # compiles
        for share in run.levels(size):
            found = []
            with run.beside(share) as entries:
                for timed in sums:
                    times = [timed(x) for _ in range(settings.repetitions)]
                    found.append((timed.case, Times.of(times)))
            write_sums(run, shape, entries, found)


def write_sums(run: Run, shape, entries: dict, found: list[tuple[Case, Times]]):
    """Times, and ratios to the first case."""
    baseline = ("lax.psum bfloat16", found[0][1])
    for case, times in found:
        said = benchmark.describe(case, shape, run.mesh.size)
        config = {**entries, "xla_flags": flags(), **said}
        for record in benchmark.sum_records("bench_nvlink", config, times, baseline):
            run.writer.write(record)
        ratio = baseline[1].median / times.median
        print(
            f"{said['message_bytes'] / MIB:9.3f} MiB, others {_share(entries)} "
            f"{case.name:32} {1e3 * times.median:9.4f} ms {ratio:6.2f}x",
            flush=True,
        )


def _share(entries: dict) -> str:
    """What others wanted of the links, and what they got."""
    got = entries["background_bytes_per_second"] / entries["link_bytes_per_second"]
    return f"{100 * entries['background']:3.0f} % (got {100 * got:3.0f} %)"


def time_stages(run: Run) -> None:
    """Codec and exchanges of a sum in 4 bits, each alone, and the buses' bandwidth."""
    settings = run.settings
    config = echo.EchoConfig(min_bytes=0, residual_dtype="int8")
    for size in settings.stage_sizes:
        if run.clock.over():
            return
        shape = benchmark.message_shape(size // 2)
        found = stage_seconds(
            run.mesh,
            shape,
            config,
            length=settings.chain,
            repetitions=settings.repetitions,
        )
        sent = sent_bytes(shape, run.mesh.size, config)
        for stage, seconds in found.items():
            entries = {"gpus": run.mesh.size, "message_bytes": size, "stage": stage}
            entries["xla_flags"] = flags()
            if stage in sent:
                entries["bus_bytes_per_second"] = sent[stage] / seconds
            run.writer.write(
                Record(
                    experiment="bench_nvlink",
                    metric="stage_ms",
                    value=1e3 * seconds,
                    unit="ms",
                    config=entries,
                )
            )
            rate = f"{sent[stage] / seconds / 1e9:8.1f} GB/s" if stage in sent else ""
            print(
                f"{size / MIB:9.3f} MiB, {stage:9} {1e3 * seconds:9.4f} ms {rate}",
                flush=True,
            )


def decoder(settings: Settings, param_dtype: str) -> DecoderConfig:
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
        param_dtype=param_dtype,
        remat="save_sums",
        attention=settings.attention,
    )


def plans() -> dict[str, echo.DepthPlan]:
    config = echo.EchoConfig(residual_dtype="int8")
    return {
        "exact": echo.DepthPlan.uniform(config.exact()),
        "echo": echo.DepthPlan.uniform(config),
        "echo edges": echo.DepthPlan.edges(config),
        "echo one shot": echo.DepthPlan.uniform(
            dataclasses.replace(config, algorithm="one-shot")
        ),
    }


def time_model(run: Run) -> None:
    """Time to first token, and of a training step, by plan and length."""
    # Served as a checkpoint is, and trained with a master copy of the parameters.
    config = decoder(run.settings, "bfloat16")
    served = random_model(config, run.mesh)
    trained = random_model(decoder(run.settings, "float32"), run.mesh)
    for length in run.settings.model_lengths:
        tokens = jnp.asarray(
            np.random.default_rng(0).integers(0, config.vocab_size, (1, length + 1))
        )
        calls = {}
        for name, plan in plans().items():
            first_token = served.first_token(plan)
            calls["ttft", name] = (first_token, served.params, tokens[:, :-1])
            step = trained.training_step(plan)
            calls["step", name] = (step, trained.params, tokens)
        for call, *arguments in calls.values():
            if run.clock.over():
                return
            jax.block_until_ready(call(*arguments))  # compiles
        for share in (0.0, *run.settings.background):
            if run.clock.over():
                return
            found = {}
            with run.beside(share) as entries:
                for key, (call, *arguments) in calls.items():
                    found[key] = _time(call, arguments, run.settings)
            write_model(run, served.num_parameters, length, entries, found)


def _time(call, arguments, settings: Settings) -> Times:
    times = []
    for _ in range(settings.repetitions):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(time.perf_counter() - start)
    return Times.of(times)


def write_model(run: Run, parameters: int, length: int, entries: dict, found: dict):
    """Times, and ratios to the exact plan."""
    for (metric, name), times in found.items():
        ratio = found[metric, "exact"].median / times.median
        print(
            f"{metric} of {parameters / 1e9:.2f} B parameters at {length}, others "
            f"{_share(entries)}: {name:12}{1e3 * times.median:9.2f} ms {ratio:6.2f}x",
            flush=True,
        )
        config = {**entries, "plan": name, "parameters": parameters, "length": length}
        config |= {"attention": run.settings.attention, "xla_flags": flags()}
        common = {"experiment": "bench_nvlink", "config": config}
        run.writer.write(
            Record(
                metric=f"{metric}_ms",
                value=1e3 * times.median,
                unit="ms",
                spread=1e3 * (times.slowest - times.fastest),
                **common,
            )
        )
        run.writer.write(
            Record(
                metric=f"{metric}_speedup",
                value=ratio,
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
            only=("default settings", "4 bits, 2 pieces", "4 bits, one shot"),
            seconds=60.0,
            repetitions=1,
            chain=2,
            pieces=(2,),
            background=(0.5,),
            background_from=0,
            stage_sizes=(MIB >> 4,),
            model_width=64,
            model_layers=1,
            model_lengths=(16,),
        )
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,), axis_types=(AxisType.Auto,))
    benchmark.check_cases(cases(settings), mesh)
    print(f"correct on {mesh.size} x {jax.devices()[0].device_kind}", flush=True)
    others = {"platform": "cpu", "copy_bytes": 1 << 16} if settings.tiny else {}
    with LinkTraffic(mesh.size, **others) as traffic:
        run = Run(
            settings=settings,
            mesh=mesh,
            writer=RecordWriter(settings.out),
            clock=Clock(settings.seconds),
            traffic=traffic,
        )
        time_sums(run)
        time_stages(run)
        time_model(run)


if __name__ == "__main__":
    main()
