"""How fast are the codec's kernels, beside a copy and beside what else could be used?

Checks each backend against the definition first, then times send, reduce, return,
return with the stream added, and the three stages of an all-reduce in a row, on one
device. The ranks are simulated: a stage does what one of them would do. One setting is
varied at a time around a reference: 1 GiB of bfloat16, 8 ranks, blocks of 64, the
one-byte residual.

    python experiments/bench_kernels.py            # minutes on one GPU
    python experiments/bench_kernels.py --others   # also bitsandbytes, torchao, PyTorch
    python experiments/bench_kernels.py --tiny     # seconds on a CPU, for CI

On a GPU a time is what the device was busy for, by its own clock through JAX's
profiler: all kernels of a call, without the gaps between launches. On a CPU it is the
time of the call. The median of several calls, with the distance of the quartiles as
spread.
"""

import dataclasses
import functools
import itertools
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import tyro

import echo_jax as echo
from echo_jax.kernels import Codec, get_codec
from echo_jax.records import Record, RecordWriter
from echo_jax.wire import compact, packing
from echo_jax.wire.compact import Compact, Nibbles

RESULTS = pathlib.Path(__file__).parent / "results" / "bench_kernels.jsonl"
WIDTH = 4096  # values of a row


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
    rotations: tuple[bool, ...] = (False, True)  # without, and with
    repeats: int = 20  # timed calls
    others: bool = False  # also time PyTorch's libraries, where they are installed
    seed: int = 0
    out: pathlib.Path = RESULTS
    tiny: bool = False  # one message of a MiB, few repetitions


def points(settings: Settings, backends: tuple[str, ...]) -> Iterator[Point]:
    """One setting varied at a time, each with the rotation off and on.

    The fastest backend in full, the others for three sizes.
    """
    for backend, rotate in itertools.product(backends, settings.rotations):
        point = functools.partial(Point, backend=backend, rotate=rotate)
        if settings.tiny:
            yield point(message_bytes=1 << 20)
            continue
        full = backend == "triton"
        powers = (30, 27, 24, 22, 20, 18, 16) if full else (30, 24, 20)
        yield from (point(message_bytes=1 << power) for power in powers)
        if full:
            yield from (point(ranks=ranks) for ranks in (2, 4, 16))
            yield from (point(block_size=size) for size in (32, 128))
            yield from (point(bits=bits) for bits in (2, 3, 6, 8))
            yield from (
                point(residual_dtype=kind) for kind in ("int4", "bfloat16", "float32")
            )


def arrays(point: Point, key: jax.Array):
    """The message, and the residuals that a call before left."""
    values = jax.jit(
        lambda key: jax.random.normal(key, point.shape, jnp.bfloat16)
    )(key)  # fmt: skip
    kept = (point.ranks, point.blocks, point.block_size)
    return values, _owed(kept, point), _owed(kept[1:], point)


def stage_calls(point: Point) -> dict[str, Callable]:
    """For each stage a call from arrays to arrays of the same shapes."""
    codec, fmt = point.codec, point.fmt
    back = functools.partial(
        codec.return_, shape=point.shape, dtype=jnp.bfloat16, fmt=fmt
    )

    def send(x, payloads, sums, w, v, rows):
        payloads, w = codec.send(x, w, fmt=fmt, chunks=point.ranks)
        return x, payloads, sums, w, v, rows

    def reduce(x, payloads, sums, w, v, rows):
        sums, v = codec.reduce(payloads, v, fmt=fmt)
        return x, payloads, sums, w, v, rows

    def return_(x, payloads, sums, w, v, rows):
        return x, payloads, sums, w, v, back(payloads[None])

    def return_add(x, payloads, sums, w, v, rows):
        return x, payloads, sums, w, v, back(payloads[None], stream=x)

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
    scale = 2 / point.block_size
    unit = {"float32": 4, "bfloat16": 2, "int8": 1 + scale, "int4": 0.5 + scale}
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


def time_call(call: Callable, state, repeats: int) -> tuple[float, float, int]:
    """Milliseconds of a call, median and distance of the quartiles; and its kernels."""
    jitted = jax.jit(lambda state: call(*state), donate_argnums=0)
    for _ in range(3):  # compiled, warm
        state = jax.block_until_ready(jitted(state))
    if jax.default_backend() == "gpu":
        times, kernels = _device_times(jitted, state, repeats)
    else:
        times, kernels = _host_times(jitted, state, repeats), 0
    low, _, high = statistics.quantiles(times, n=4)
    return statistics.median(times), high - low, kernels


def _device_times(jitted, state, repeats: int) -> tuple[list[float], int]:
    """What the device was busy for in each of several calls, by its profile."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                state = jitted(state)
            jax.block_until_ready(state)
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
        events = [
            (event.start_ns, event.duration_ns)
            for plane in profile.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    kernels, rest = divmod(len(events), repeats)
    assert kernels > 0, "the profile has no kernels"
    assert rest == 0, f"{len(events)} kernels in {repeats} calls"
    busy = [duration / 1e6 for _, duration in sorted(events)]
    starts = range(0, len(busy), kernels)
    return [sum(busy[start : start + kernels]) for start in starts], kernels


def _host_times(jitted, state, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        state = jax.block_until_ready(jitted(state))
        times.append((time.perf_counter() - start) * 1e3)
    return times


def time_copy(message_bytes: int, key: jax.Array, repeats: int):
    """A pass that reads as many bytes as the message has and writes as many."""
    x = jax.random.bits(key, (message_bytes // 4,), jnp.uint32)
    return time_call(lambda x, y: (x, ~x), (x, jnp.zeros_like(x)), repeats)


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
    rows = jax.jit(functools.partial(codec.return_, **static))(expected[None])
    expected_rows = jax.jit(functools.partial(xla.return_, **static))(expected[None])
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
    calls = stage_calls(point)
    if point != Point(
        backend=point.backend, message_bytes=point.message_bytes, rotate=point.rotate
    ):
        del calls["return_add"]  # only the size of the message matters to it
    for stage, call in calls.items():
        copied = jax.tree.map(jnp.copy, state)
        value, spread, kernels = time_call(call, copied, settings.repeats)
        moved = moved_bytes(point, stage)
        details = {**config, "stage": stage, "moved_bytes": moved, "kernels": kernels}
        write("codec_ms", value, "ms", details, spread=spread, baseline="copy")
        rate = moved / value / 1e9
        print(
            f"{_label(point)} {stage:10} {value:8.4f} ms  {rate:6.3f} TB/s "
            f"({kernels} kernels)",
            flush=True,
        )


def _label(point: Point) -> str:
    turned = "rotated" if point.rotate else "plain"
    return (
        f"{point.backend:6} {point.message_bytes >> 10:>8} KiB, {point.ranks:2} ranks, "
        f"{point.bits} bits, block {point.block_size:3}, {turned:7}, "
        f"{point.residual_dtype:8}"
    )


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        settings = dataclasses.replace(settings, repeats=2)
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
    chosen = list(points(settings, backends))
    for size in sorted({point.message_bytes for point in chosen}):
        value, spread, _ = time_copy(size, key, settings.repeats)
        config = {"message_bytes": size, "moved_bytes": 2 * size}
        write("copy_ms", value, "ms", config, spread=spread)
    for point in chosen:
        measure(point, settings, write)
    if settings.others:
        from bench_other_codecs import measure_others

        measure_others(write)


def _owed(shape, point: Point):
    """A residual of zeros of the wanted kind."""
    kind = {"int8": Compact, "int4": Nibbles}.get(point.residual_dtype)
    if kind is not None:
        return compact.zeros(shape, kind)
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
