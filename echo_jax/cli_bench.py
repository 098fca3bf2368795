"""The commands of ``echo-jax bench``: what takes how long on the mesh that is there."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import jax
import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from echo_jax import benchmark
from echo_jax.benchmark import Case
from echo_jax.cli_model import ModelOptions
from echo_jax.cli_output import Output
from echo_jax.config import EchoConfig
from echo_jax.devices import Cluster, Device, tensor_mesh
from echo_jax.models.generation import bucket, bytes_per_token
from echo_jax.models.loading import LoadedModel
from echo_jax.models.timing import Times, time_to_first_token
from echo_jax.plan import DepthPlan
from echo_jax.records import Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchFirstToken:
    """Time to the first token of a prompt, with exact all-reduces and with echo's.

    Compilation is left out.
    """

    checkpoint: tyro.conf.OmitArgPrefixes[ModelOptions]
    length: int = 512
    """Tokens of a prompt."""
    batch: int = 1
    """Prompts at once."""
    repeats: int = 5
    """Timed runs of each plan."""
    out: pathlib.Path | None = None
    """File that JSON lines are appended to."""
    config: tyro.conf.OmitArgPrefixes[EchoConfig] = EchoConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchAllReduce:
    """Time of one all-reduce over sizes: lax.psum against echo, whole and in pieces.

    Correctness is checked first. Then the cases take turns; a time is that of a chain
    of dependent sums, divided by its length.
    """

    sizes: tuple[int, ...] = tuple(1 << n for n in range(14, 27, 2))
    """Bytes of a rank's message; default 16 KiB to 64 MiB."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the message; default bfloat16, but float16 on the CPU, whose sums would
    widen bfloat16 to float32."""
    chunks: tuple[int, ...] = (1, 4)
    """Values of num_chunks to try: pieces that a message is sent in."""
    chain: int = 4
    """Sums in a row, each of the result of the one before, that are timed together."""
    repeats: int = 5
    """Timed rounds."""
    tensor_ranks: int | None = None
    """Ranks that sum; default all devices, or 1 with --device cpu."""
    device: Device = "default"
    """cpu simulates as many devices as there are ranks; default takes JAX's own."""
    cluster: tyro.conf.OmitArgPrefixes[Cluster] = Cluster()
    config: tyro.conf.OmitArgPrefixes[EchoConfig] = EchoConfig()
    out: pathlib.Path | None = None
    """File that JSON lines are appended to."""

    def __post_init__(self):
        if not self.sizes or not 4 <= min(self.sizes) <= max(self.sizes) <= 1 << 40:
            raise ValueError(
                f"sizes={self.sizes} must hold bytes, 4 or more each, a TiB at most."
            )
        if min(self.chunks, default=0) < 1:
            raise ValueError(f"chunks={self.chunks} must hold numbers of at least 1.")
        if min(self.chain, self.repeats) < 1:
            raise ValueError(
                f"chain={self.chain} and repeats={self.repeats} must be at least 1."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure on the mesh that is there."""

    what: tyro.conf.OmitArgPrefixes[
        Annotated[BenchFirstToken, tyro.conf.subcommand("ttft", prefix_name=False)]
        | Annotated[
            BenchAllReduce, tyro.conf.subcommand("allreduce", prefix_name=False)
        ]
    ]


def bench(command: Bench) -> Callable[[], int]:
    """Does what a wrong argument can stop; what is returned does the rest.

    Raises:
      ValueError: saying what is wrong.
    """
    if isinstance(command.what, BenchAllReduce):
        return _bench_all_reduce(command.what)
    return _bench_first_token(command.what)


def _bench_first_token(command: BenchFirstToken) -> Callable[[], int]:
    """Loads and measures, which can refuse a prompt; what is returned prints."""
    model = command.checkpoint.load(command.checkpoint.make_mesh())
    plans = {
        "exact": DepthPlan.uniform(command.config.exact()),
        "echo, 8 bits at the ends": DepthPlan.edges(command.config),
        "echo": DepthPlan.uniform(command.config),
    }
    device = jax.devices()[0].device_kind
    table = Table(
        "all-reduces",
        "median, ms",
        "fastest to slowest",
        "bytes a token and rank",
        title=f"First token of {command.batch} x {command.length} on {model.ranks} "
        f"ranks ({device})",
    )
    tokens = command.batch * bucket(command.length)
    for plan in plans.values():
        plan.check_backends()
    output = Output(command.out)
    for name, plan in plans.items():
        times = time_to_first_token(
            model,
            plan,
            length=command.length,
            batch=command.batch,
            repeats=command.repeats,
        )
        sent = bytes_per_token(model, plan, tokens=tokens)
        table.add_row(name, *_cells(times), f"{sent:,.0f}")
        config = {"plan": name, **_first_token_config(command, model, plan)}
        output.write(_first_token_record(config | {"bytes_per_token": sent}, times))

    def finish() -> int:
        Console().print(table)
        return output.close()

    return finish


def _first_token_config(
    command: BenchFirstToken, model: LoadedModel, plan: DepthPlan
) -> dict[str, Any]:
    """What was chosen; of the plan, the configuration of the layers in between."""
    return {
        "ranks": model.ranks,
        "model": command.checkpoint.model.name,
        "dtype": model.config.dtype,
        "attention": command.checkpoint.attention,
        "length": command.length,
        "batch": command.batch,
        "repeats": command.repeats,
        "path": plan.body.path,
        "vocab_bits": plan.vocab_bits,
        **benchmark.configuration(plan.body),
    }


def _first_token_record(config: dict[str, Any], times: Times) -> Record:
    """A plan's time."""
    return Record(
        experiment="bench_ttft",
        metric="ttft_ms",
        value=1e3 * times.median,
        unit="ms",
        spread=1e3 * (times.slowest - times.fastest),
        config=config,
    )


def _bench_all_reduce(command: BenchAllReduce) -> Callable[[], int]:
    """Lays out the mesh; what is returned checks the sums and times them."""
    mesh = tensor_mesh(command.tensor_ranks, command.device, command.cluster)
    if mesh.size < 2:
        raise ValueError(
            "1 rank has nothing to sum: use --tensor-ranks with more devices; "
            "--device cpu simulates them."
        )
    DepthPlan.uniform(command.config).check_backends()
    output = Output(command.out if jax.process_index() == 0 else None)
    on_cpu = jax.devices()[0].platform == "cpu"
    dtype = command.dtype or ("float16" if on_cpu else "bfloat16")

    def finish() -> int:
        cases = _cases(command, dtype)
        benchmark.check_cases(cases, mesh)
        table = Table(
            *("message", "case", "path", "median, ms", "from, to", "against psum"),
            title=f"All-reduce of {dtype} over {mesh.size} ranks "
            f"({jax.process_count()} x {jax.local_device_count()} "
            f"{jax.devices()[0].device_kind}), sums right on all of them",
        )
        for size in command.sizes:
            times = _time_size(command, cases, mesh, size, table)
            for record in _size_records(command, cases, mesh, size, times):
                output.write(record)
        if jax.process_index() == 0:
            Console().print(table)
        return output.close()

    return finish


def _cases(command: BenchAllReduce, dtype: str) -> list[Case]:
    """The exact sum first: it is the baseline of the others."""
    return [
        Case(name=f"psum {dtype}", dtype=dtype),
        *(
            Case(
                name=f"echo, {chunks} pieces" if chunks > 1 else "echo",
                config=dataclasses.replace(command.config, num_chunks=chunks),
                dtype=dtype,
            )
            for chunks in dict.fromkeys(command.chunks)
        ),
    ]


def _shape(cases: list[Case], size: int) -> tuple[int, int]:
    """Of a message of about so many bytes."""
    itemsize = jax.numpy.dtype(cases[0].dtype).itemsize
    return benchmark.message_shape(size // itemsize)


def _time_size(
    command: BenchAllReduce, cases: list[Case], mesh: Mesh, size: int, table: Table
) -> dict[str, Times]:
    """Times of every case at one size, also as rows of the table."""
    shape = _shape(cases, size)
    times = benchmark.time_cases(
        cases, mesh, shape, length=command.chain, repetitions=command.repeats
    )
    table.add_section()
    for case in cases:
        said = benchmark.describe(case, shape, mesh.size)
        ratio = times[cases[0].name].median / times[case.name].median
        table.add_row(
            f"{said['message_bytes']:,} B",
            case.name,
            str(said["path"]),
            *_cells(times[case.name]),
            f"{ratio:.2f}x",
        )
    return times


def _size_records(
    command: BenchAllReduce,
    cases: list[Case],
    mesh: Mesh,
    size: int,
    times: dict[str, Times],
) -> Iterator[Record]:
    """The times of one size, each beside that of the exact sum."""
    baseline = (cases[0].name, times[cases[0].name])
    for case in cases:
        config = {
            "ranks": mesh.size,
            "processes": jax.process_count(),
            "chain": command.chain,
            **benchmark.describe(case, _shape(cases, size), mesh.size),
        }
        yield from benchmark.sum_records(
            "bench_allreduce", config, times[case.name], baseline
        )


def _cells(times: Times) -> tuple[str, str]:
    """Median and range in milliseconds."""
    low, high = 1e3 * times.fastest, 1e3 * times.slowest
    return f"{1e3 * times.median:.3g}", f"{low:.3g} to {high:.3g}"
