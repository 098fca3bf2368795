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
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import echo_jax as echo
from echo_jax.cli import use_cpu_devices
from echo_jax.layers import merge_module, shardings, split_module
from echo_jax.models import Decoder, DecoderConfig
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


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to add up."""

    name: str
    config: echo.EchoConfig | None  # None: lax.psum


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
        Case("psum bf16", None),
        Case("default settings", echo.EchoConfig()),
        Case("4 bits", config()),
        Case("4 bits, int4 residual", config(residual="int4")),
        Case("4 bits, not rotated", config(rotate=False)),
        Case("4 bits, no feedback", config(feedback=False)),
        Case("8 bits", config(bits=8)),
        *(Case(f"4 bits, {n} pieces", config(pieces=n)) for n in settings.pieces),
    ]


class Clock:
    """Says when the time for new measurements is over."""

    def __init__(self, seconds: float):
        self.end = time.monotonic() + seconds

    def over(self) -> bool:
        return time.monotonic() > self.end


def chain(case: Case, mesh: Mesh, length: int) -> Callable:
    """A jitted run of dependent sums, ``(x, residual) -> (residual, y)``."""

    def local(x, residual):
        y = x[0]
        for _ in range(length):
            # What was summed is summed again: the next call waits for this one, and
            # nothing but the sums takes time.
            if case.config is None:
                y = lax.psum(y, AXIS)
            else:
                y, residual = echo.echo_psum(y, residual, AXIS, config=case.config)
            y = lax.pcast(y, AXIS, to="varying")
        # The sum last, or XLA gives it the memory of the residual.
        return residual, y[None]

    spec = PartitionSpec(AXIS)
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec)
    )
    return jax.jit(mapped, donate_argnums=1)


def start_residual(case: Case, mesh: Mesh, shape):
    """Owing nothing; None for the sums that feed nothing back."""
    config = case.config
    if config is None or not config.feedback:
        return None

    def local():
        return echo.init_residual(shape, AXIS, config=config)

    spec = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=spec))()


def message(mesh: Mesh, size: int):
    """Gaussian bfloat16 partial sums of so many bytes on every rank."""
    width = 8192 if size >= MIB else 1024
    shape = (mesh.size, size // 2 // width, width)
    placed = NamedSharding(mesh, PartitionSpec(AXIS))
    draw = jax.jit(
        lambda: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16),
        out_shardings=placed,
    )
    return draw()


def check(settings: Settings, mesh: Mesh) -> None:
    """Sums agree with the exact one within the bound; all ranks hold the same bytes."""
    x = message(mesh, MIB)
    exact = np.asarray(x, np.float32).sum(axis=0)
    for case in cases(settings):
        residual = start_residual(case, mesh, x.shape[1:])
        _, y = chain(case, mesh, 1)(x, residual)
        copies = [np.asarray(shard.data)[0] for shard in y.addressable_shards]
        assert all(copy.tobytes() == copies[0].tobytes() for copy in copies), case.name
        error = np.linalg.norm(copies[0].astype(np.float32) - exact)
        relative = error / np.linalg.norm(exact)
        # bfloat16 sums round by 2**-8; two roundings of Gaussian blocks leave about
        # 0.15 at 4 bits and a sixteenth of it at 8.
        bits = case.config.format.bits if case.config else 16
        limit = 0.01 + 0.2 * 2.0 ** (4 - bits)
        assert relative < limit, f"{case.name}: relative error {relative}"


def time_sums(settings: Settings, mesh: Mesh, writer: RecordWriter, clock: Clock):
    """Every case at every size, largest messages last."""
    for size in settings.sizes:
        x, baseline = message(mesh, size), None
        length = settings.chain if size <= 16 * MIB else max(1, settings.chain // 2)
        for case in cases(settings):
            if clock.over():
                continue
            run = chain(case, mesh, length)
            residual = start_residual(case, mesh, x.shape[1:])
            residual, y = jax.block_until_ready(run(x, residual))
            times = []
            for _ in range(settings.repetitions):
                start = time.perf_counter()
                residual, y = jax.block_until_ready(run(x, residual))
                times.append((time.perf_counter() - start) / length * 1e3)
            del y, residual
            median = statistics.median(times)
            baseline = baseline or median
            record_sum(settings, writer, case, mesh, size, times, baseline)
            print(
                f"{size / MIB:9.3f} MiB {case.name:24} {median:9.4f} ms "
                f"{baseline / median:6.2f}x",
                flush=True,
            )


def record_sum(settings, writer, case, mesh, size, times, baseline) -> None:
    median = statistics.median(times)
    config = {
        "gpus": mesh.size,
        "message_bytes": size,
        "case": case.name,
        "num_chunks": case.config.num_chunks if case.config else 1,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    if case.config is not None:
        config["bits"] = case.config.format.bits
        config["rotate"] = case.config.format.rotate
        config["residual_dtype"] = case.config.residual_dtype
        config["path"] = echo.explain(
            (size // 2,), "bfloat16", mesh.size, case.config
        ).path
    spread = max(times) - min(times)
    common = {"experiment": "bench_nvlink", "config": config}
    writer.write(
        Record(metric="allreduce_ms", value=median, unit="ms", spread=spread, **common)
    )
    writer.write(
        Record(
            metric="allreduce_speedup",
            value=baseline / median,
            unit="1",
            baseline="lax.psum bfloat16",
            **common,
        )
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
    config.check_ranks(mesh.size)

    def build():
        return Decoder(config, rngs=nnx.Rngs(0))

    graphdef, _, specs = split_module(jax.eval_shape(build))
    init = jax.jit(
        lambda: split_module(build())[1], out_shardings=shardings(specs, mesh)
    )
    params = init()
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    for length in settings.model_lengths:
        tokens = jnp.asarray(
            np.random.default_rng(0).integers(0, config.vocab_size, (1, length + 1))
        )
        baselines: dict[str, float] = {}
        for name, plan in plans().items():
            runs = {
                "ttft": first_token(graphdef, specs, mesh, plan),
                "step": training_step(graphdef, specs, mesh, plan),
            }
            for metric, run in runs.items():
                if clock.over():
                    continue
                jax.block_until_ready(run(params, tokens))
                times = []
                for _ in range(settings.repetitions):
                    start = time.perf_counter()
                    jax.block_until_ready(run(params, tokens))
                    times.append((time.perf_counter() - start) * 1e3)
                median = statistics.median(times)
                baseline = baselines.setdefault(metric, median)
                print(
                    f"{metric} of {count / 1e9:.2f} B parameters at {length}: {name:12}"
                    f"{median:9.2f} ms {baseline / median:6.2f}x",
                    flush=True,
                )
                chosen = {
                    "gpus": mesh.size,
                    "plan": name,
                    "parameters": count,
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


def first_token(graphdef, specs, mesh: Mesh, plan: echo.DepthPlan) -> Callable:
    """A jitted ``(params, tokens) -> id`` of the most likely next token."""

    def local(params, tokens):
        logits, _ = merge_module(graphdef, params)(tokens[:, :-1], plan=plan)
        last = logits[:, -1].astype(jnp.float32)
        best = lax.pmax(jnp.max(last, axis=-1), AXIS)
        offset = lax.axis_index(AXIS) * last.shape[-1]
        mine = jnp.where(jnp.max(last, axis=-1) == best, jnp.argmax(last, axis=-1), -1)
        return lax.pmax(jnp.where(mine >= 0, mine + offset, -1), AXIS)

    spec = PartitionSpec()
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(specs, spec), out_specs=spec)
    )


def training_step(graphdef, specs, mesh: Mesh, plan: echo.DepthPlan) -> Callable:
    """A jitted ``(params, tokens) -> (loss, params)`` with plain gradient descent."""

    def local(params, tokens):
        def loss(params):
            module = merge_module(graphdef, params)
            return module.loss(tokens[:, :-1], tokens[:, 1:], plan=plan)[0]

        value, gradient = jax.value_and_grad(loss)(params)
        updates = jax.tree.map(lambda g: -1e-4 * g, gradient)
        return value, optax.apply_updates(params, updates)

    spec = PartitionSpec()
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(specs, spec), out_specs=(spec, specs))
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
    check(settings, mesh)
    print(f"correct on {mesh.size} x {jax.devices()[0].device_kind}", flush=True)
    time_sums(settings, mesh, writer, clock)
    time_model(settings, mesh, writer, clock)


if __name__ == "__main__":
    main()
