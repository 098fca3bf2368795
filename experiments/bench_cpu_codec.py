"""The codec on a CPU: values a second that one core sends, sums and returns.

By processor time, so that what else the machine does and how many cores share the work
do not count. Beside it the floor: a copy of as many bytes as the stage must move.

    python experiments/bench_cpu_codec.py              # a minute
    python experiments/bench_cpu_codec.py --tiny       # for CI
"""

import dataclasses
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import tyro

import echo_jax as echo
from echo_jax.devices import use_cpu_devices
from echo_jax.kernels import get_codec
from echo_jax.records import Record, RecordWriter
from echo_jax.wire import compact

RESULTS = pathlib.Path(__file__).parent / "results" / "bench_cpu_codec.jsonl"
EXPERIMENT = "bench_cpu_codec"
WIDTH = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    values: int = 1 << 22  # of a message; larger ones time the allocation of memory
    ranks: int = 2
    dtypes: tuple[str, ...] = ("float32", "bfloat16")  # of the message
    repeats: int = 9  # the median counts
    seed: int = 0
    out: pathlib.Path = RESULTS
    tiny: bool = False  # a small message, few repetitions


def core_seconds(call: Callable, state, repeats: int) -> tuple[float, float]:
    """Processor time of ``state -> state``, median and distance of the quartiles."""
    run = jax.jit(call, donate_argnums=0)
    for _ in range(2):
        state = jax.block_until_ready(run(state))
    times = []
    for _ in range(repeats):
        start = time.process_time()
        state = jax.block_until_ready(run(state))
        times.append(time.process_time() - start)
    low, middle, high = statistics.quantiles(times, n=4)
    return middle, high - low


def stages(x, fmt: echo.WireFormat, residual_dtype: str | None, ranks: int):
    """For each stage a call from a state to the same, and the bytes that it moves."""
    codec = get_codec("xla", fmt)
    shape = (ranks, x.size // fmt.block_size // ranks, fmt.block_size)
    owed, owed_bytes = None, 0
    if residual_dtype == "int8":
        owed, owed_bytes = compact.zeros(shape), x.size * (1 + 2 / fmt.block_size)
    elif residual_dtype is not None:
        owed = jnp.zeros(shape, residual_dtype)
        owed_bytes = owed.nbytes
    wire_bytes = x.size * fmt.bits_per_value / 8

    def send(state):
        x, owed, _, rows = state
        payloads, owed = codec.send(x, owed, fmt=fmt, chunks=ranks)
        return x, owed, payloads, rows

    def return_(state):
        x, owed, payloads, _ = state
        rows = codec.return_(payloads[None], shape=x.shape, dtype=x.dtype, fmt=fmt)
        return x, owed, payloads, rows

    payloads, _ = codec.send(x, None, fmt=fmt, chunks=ranks)
    state = (x, owed, payloads, jnp.zeros_like(x))
    moved = {
        "send": x.nbytes + 2 * owed_bytes + wire_bytes,
        "return": x.nbytes + wire_bytes,
    }
    return state, {"send": send, "return": return_}, moved


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        settings = dataclasses.replace(settings, values=1 << 16, repeats=2)
    use_cpu_devices(1)
    writer = RecordWriter(settings.out)
    key = jax.random.key(settings.seed)
    words = jax.random.bits(key, (settings.values,), jnp.uint32)
    seconds, _ = core_seconds(
        lambda state: (state[0], state[0] ^ 1),
        (words, jnp.zeros_like(words)),
        settings.repeats,
    )
    copy_rate = 2 * words.nbytes / seconds  # bytes a second
    for dtype, rotate, residual in itertools.product(
        settings.dtypes, (False, True), (None, "bfloat16", "int8")
    ):
        fmt = echo.WireFormat(rotate=rotate)
        draw = jax.random.normal(key, (settings.values // WIDTH, WIDTH), jnp.float32)
        x = draw.astype(dtype)
        state, calls, moved = stages(x, fmt, residual, settings.ranks)
        for stage, call in calls.items():
            fresh = jax.tree.map(jnp.copy, state)
            seconds, spread = core_seconds(call, fresh, settings.repeats)
            rate = settings.values / seconds
            floor = settings.values / (moved[stage] / copy_rate)
            print(
                f"{dtype:9} {'rotated' if rotate else 'plain':8} {residual!s:9} "
                f"{stage:7} {rate / 1e6:7.0f} M values a core second; a copy of its "
                f"bytes {floor / 1e6:7.0f}",
                flush=True,
            )
            config = {
                "stage": stage,
                "dtype": dtype,
                "rotate": rotate,
                "residual_dtype": residual,
                "bits": fmt.bits,
                "block_size": fmt.block_size,
                "ranks": settings.ranks,
                "values": settings.values,
            }
            common = {
                "experiment": EXPERIMENT,
                "unit": "values/s",
                "seed": settings.seed,
                "config": config,
            }
            writer.write(
                Record(
                    metric="codec_values_per_core_second",
                    value=rate,
                    spread=rate * spread / seconds,
                    baseline="copy",
                    **common,
                )
            )
            writer.write(
                Record(metric="copy_values_per_core_second", value=floor, **common)
            )


if __name__ == "__main__":
    main()
