"""How fast are the codec's kernels, beside a copy and beside what else could be used?

Checks each backend against the definition first, then times send, reduce, return,
return with the stream added, and the three stages of an all-reduce in a row, on one
device. The ranks are simulated: a stage does what one of them would do. One setting is
varied at a time around a reference: 1 GiB of bfloat16, 8 ranks, blocks of 64, the
one-byte residual.

    python experiments/bench_kernels.py            # minutes on one GPU
    python experiments/bench_kernels.py --others   # also bitsandbytes, torchao, PyTorch
    python experiments/bench_kernels.py --tiny     # seconds on a CPU, for CI

A time is that of one iteration of a loop inside one compiled program, launches
included; the median of several runs, with the distance of the quartiles as spread.
"""

import dataclasses
import functools
import itertools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import tyro
from jax import lax

import echo_jax as echo
from echo_jax.kernels import Codec, get_codec
from echo_jax.records import Record, RecordWriter
from echo_jax.wire import compact, packing

RESULTS = pathlib.Path(__file__).parent / "results" / "bench_kernels.jsonl"
WIDTH = 4096  # values of a row
_UNROLL = 8  # iterations of a loop without a branch between them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One setting of the codec and of the message."""

    backend: str
    message_bytes: int = 1 << 30
    ranks: int = 8
    block_size: int = 64
    bits: int = 4
    rotate: bool = False
    residual_dtype: str = "int8"

    @property
    def fmt(self) -> echo.WireFormat:
        return echo.WireFormat(
            bits=self.bits, block_size=self.block_size, rotate=self.rotate
        )

    @property
    def codec(self) -> Codec:
        return get_codec(self.backend, self.fmt)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.message_bytes // 2 // WIDTH, WIDTH)

    @property
    def blocks(self) -> int:
        return self.message_bytes // 2 // self.block_size // self.ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    backends: tuple[str, ...] = ()  # all that can run here, unless given
    repeats: int = 9  # runs of each loop
    loop_ms: float = 20.0  # about how long a loop lasts
    others: bool = False  # also time PyTorch's libraries, where they are installed
    seed: int = 0
    out: pathlib.Path = RESULTS
    tiny: bool = False  # one message of a MiB, few repetitions


def points(backends: tuple[str, ...], *, tiny: bool) -> Iterator[Point]:
    """One setting varied at a time, each with the rotation off and on."""
    sizes = (
        [1 << 20] if tiny else [1 << power for power in (16, 18, 20, 22, 24, 27, 30)]
    )
    for backend, rotate in itertools.product(backends, (False, True)):
        point = functools.partial(Point, backend=backend, rotate=rotate)
        varied = [point(message_bytes=size) for size in reversed(sizes)]
        if backend == backends[0] and not tiny:
            varied += [point(ranks=ranks) for ranks in (2, 4, 16)]
            varied += [point(block_size=size) for size in (32, 128)]
            varied += [point(bits=bits) for bits in (2, 8)]
            varied += [point(residual_dtype=kind) for kind in ("bfloat16", "float32")]
        yield from varied


def arrays(point: Point, key: jax.Array):
    """The message, and the residuals that a call before left."""
    values = jax.jit(
        lambda key: jax.random.normal(key, point.shape, jnp.bfloat16)
    )(key)  # fmt: skip
    kept = (point.ranks, point.blocks, point.block_size)
    return values, _owed(kept, point), _owed(kept[1:], point)


def stage_loops(point: Point) -> dict[str, Callable]:
    """For each stage one iteration, from arrays to arrays of the same shapes.

    Each depends on the iteration before, so that none can be moved out of the loop.
    """
    codec, fmt, shape = point.codec, point.fmt, point.shape
    back = functools.partial(codec.return_, shape=shape, dtype=jnp.bfloat16, fmt=fmt)

    def send(x, payloads, sums, w, v, rows):
        x, payloads = lax.optimization_barrier((x, payloads))
        payloads, w = codec.send(x, w, fmt=fmt, chunks=point.ranks)
        return x, payloads, sums, w, v, rows

    def reduce(x, payloads, sums, w, v, rows):
        payloads, sums = lax.optimization_barrier((payloads, sums))
        sums, v = codec.reduce(payloads, v, fmt=fmt)
        return x, payloads, sums, w, v, rows

    def return_(x, payloads, sums, w, v, rows):
        payloads, rows = lax.optimization_barrier((payloads, rows))
        return x, payloads, sums, w, v, back(payloads)

    def return_add(x, payloads, sums, w, v, rows):
        return x, payloads, sums, w, v, back(payloads, stream=rows)

    def total(*state):
        # Every rank's chunk of the sum would travel; the payloads have their size.
        return return_(*reduce(*send(*state)))

    return {
        "send": send,
        "reduce": reduce,
        "return": return_,
        "return_add": return_add,
        "total": total,
    }


def moved_bytes(point: Point, stage: str) -> int:
    """The fewest bytes that a stage reads and writes."""
    values = point.message_bytes // 2
    unit = {"float32": 4, "bfloat16": 2, "int8": 1 + 2 / point.block_size}
    kept = 2 * unit[point.residual_dtype]
    wire = point.fmt.bits_per_value / 8
    a_value = {
        "send": 2 + kept + wire,
        "reduce": wire + (kept + wire) / point.ranks,
        "return": wire + 2,
        "return_add": wire + 4,
    }
    a_value["total"] = sum(a_value[name] for name in ("send", "reduce", "return"))
    return round(a_value[stage] * values)


def time_loop(
    step: Callable, state, moved: int, settings: Settings
) -> tuple[float, float]:
    """Milliseconds of one iteration: the median, and the distance of the quartiles."""
    # Long enough for the host's part to vanish; of a fixed length, or the host would
    # look at the loop's condition in each iteration.
    expected_ms = moved / 3e9 + 0.01
    count = _UNROLL * max(1, round(settings.loop_ms / expected_ms / _UNROLL))

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(state):
        return lax.fori_loop(
            0, count, lambda _, state: tuple(step(*state)), state, unroll=_UNROLL
        )

    state = jax.block_until_ready(loop(state))
    times = []
    for _ in range(settings.repeats):
        start = time.perf_counter()
        state = jax.block_until_ready(loop(state))
        times.append((time.perf_counter() - start) * 1e3 / count)
    low, _, high = statistics.quantiles(times, n=4)
    return statistics.median(times), high - low


def time_copy(message_bytes: int, key: jax.Array, settings: Settings):
    """A pass that reads and writes as many bytes as the message has."""
    x = jax.random.bits(key, (message_bytes // 4,), jnp.uint32)

    def copy(x, y):
        x, y = lax.optimization_barrier((x, y))
        return x, ~x

    return time_loop(copy, (x, jnp.zeros_like(x)), 2 * message_bytes, settings)


def differing_codes(point: Point, key: jax.Array) -> float:
    """The share of codes that differ from the definition's, of send and reduce.

    Raises:
      ValueError: if scales or what the message reads back as differ.
    """
    small = dataclasses.replace(point, message_bytes=min(point.message_bytes, 1 << 23))
    x, w, v = arrays(small, key)
    found = []
    for codec in (small.codec, get_codec("xla", small.fmt)):
        send = functools.partial(codec.send, fmt=small.fmt, chunks=small.ranks)
        payloads, _ = jax.jit(send)(x, w)
        found.append((codec, payloads))
    (codec, payloads), (xla, expected) = found
    sums, _ = jax.jit(functools.partial(codec.reduce, fmt=small.fmt))(expected, v)
    expected_sums, _ = jax.jit(functools.partial(xla.reduce, fmt=small.fmt))(
        expected, v
    )
    static = {"shape": small.shape, "dtype": x.dtype, "fmt": small.fmt}
    rows = jax.jit(functools.partial(codec.return_, **static))(expected)
    expected_rows = jax.jit(functools.partial(xla.return_, **static))(expected)
    if not (rows == expected_rows).all():
        raise ValueError(f"{point}: return differs from the definition")
    shares = []
    for got, want in ((payloads, expected), (sums[None], expected_sums[None])):
        codes, scales = packing.split(got, small.fmt)
        wanted_codes, wanted_scales = packing.split(want, small.fmt)
        if not (scales == wanted_scales).mean() > 0.9999:
            raise ValueError(f"{point}: scales differ from the definition's")
        shares.append(float(jnp.mean(codes != wanted_codes)))
    return max(shares)


def measure(point: Point, settings: Settings, write: Callable) -> None:
    """Checks one point, then times its stages."""
    config = dataclasses.asdict(point)
    keys = jax.random.split(jax.random.key(settings.seed), 2)
    if point.backend != "xla":
        share = differing_codes(point, keys[0])
        write("differing_codes", share, "1", {**config, "stage": "all"}, baseline="xla")
    x, w, v = arrays(point, keys[1])
    payload_bytes = point.blocks * point.fmt.block_bytes
    payloads = jnp.zeros((point.ranks, payload_bytes), jnp.uint8)
    state = (x, payloads, payloads[0], w, v, jnp.zeros_like(x))
    del x, w, v, payloads
    # One stage after the other on the same memory, as a call would use it.
    for stage, step in stage_loops(point).items():
        copied = jax.tree.map(jnp.copy, state)
        moved = moved_bytes(point, stage)
        value, spread = time_loop(step, copied, moved, settings)
        details = {**config, "stage": stage, "moved_bytes": moved}
        write("codec_ms", value, "ms", details, spread=spread, baseline="copy")
        rate = moved / value / 1e9
        print(f"{point}\n    {stage:10} {value:8.4f} ms  {rate:6.3f} TB/s", flush=True)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        settings = dataclasses.replace(settings, repeats=2, loop_ms=0.1)
    backends = settings.backends or _backends()
    writer = RecordWriter(settings.out)

    def write(metric, value, unit, config, **rest):
        writer.write(
            Record(
                experiment="bench_kernels",
                metric=metric,
                value=value,
                unit=unit,
                seed=settings.seed,
                config=config,
                **rest,
            )
        )

    key = jax.random.key(settings.seed)
    chosen = list(points(backends, tiny=settings.tiny))
    for size in sorted({point.message_bytes for point in chosen}):
        value, spread = time_copy(size, key, settings)
        config = {"message_bytes": size, "moved_bytes": 2 * size}
        write("copy_ms", value, "ms", config, spread=spread)
    for point in chosen:
        measure(point, settings, write)
    if settings.others:
        from bench_other_codecs import measure_others

        measure_others(write)


def _owed(shape, point: Point):
    """A residual of zeros of the wanted kind."""
    if point.residual_dtype == "int8":
        return compact.zeros(shape)
    return jnp.zeros(shape, point.residual_dtype)


def _backends() -> tuple[str, ...]:
    """Every backend that can run here, the fastest first."""
    found = []
    for backend in ("triton", "pallas", "xla"):
        try:
            get_codec(backend, echo.WireFormat())
        except ValueError as error:
            print(f"without {backend}: {error}")
        else:
            found.append(backend)
    return tuple(found)


if __name__ == "__main__":
    sys.exit(main())
