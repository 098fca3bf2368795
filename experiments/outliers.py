"""How many calls until compensation has caught up with an outlier or a shift?

Sums outputs over simulated ranks while something happens half-way: one value of every
block is a spike for one call; all values become larger or smaller for good; a few
channels become outliers for good. Measures each block's error after every call, in the
values that are no outliers, and counts the calls after the event until it stays within
twice of what it was before (after a spike) or settles at (after a shift).

    python experiments/outliers.py            # half a minute on two CPU cores
    python experiments/outliers.py --tiny     # seconds, for CI
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import echo_jax as echo
from echo_jax.records import Record, RecordWriter

RESULTS = pathlib.Path(__file__).parent / "results" / "outliers.jsonl"
AXIS = "tensor"
BLOCK_SIZE = 64
SPIKE_AT = 17  # position in the block
CHANNELS = (17, 40)  # of each block that become outliers

Event = Literal["spike", "shift_up", "shift_down", "channels"]
EVENTS: tuple[Event, ...] = ("spike", "shift_up", "shift_down", "channels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    sizes: tuple[float, ...] = (100.0, 1e4)  # over a typical value
    bits: tuple[int, ...] = (2, 4)  # widths of a code
    blocks: int = 256  # of a rank's tensor
    ranks: int = 8  # simulated
    calls: int = 64  # the event is at half of them
    seed: int = 0
    out: pathlib.Path = RESULTS
    tiny: bool = False  # one size, one width


@functools.cache
def compiled(config: echo.EchoConfig, settings: Settings) -> Callable:
    """A jitted ``(key, event, size) -> error (calls, blocks)`` outside the outliers."""
    shape = (settings.blocks, BLOCK_SIZE)
    half = settings.calls // 2

    def disturb(x, call, event, size, rank):
        position = jnp.arange(BLOCK_SIZE)
        spike = (position == SPIKE_AT) & (call == half) & (rank == 0)
        after = call >= half
        channel = jnp.isin(position, jnp.array(CHANNELS)) & after
        return jax.lax.switch(
            event,
            [
                lambda x: jnp.where(spike, size, x),
                lambda x: jnp.where(after, x * size, x),
                lambda x: jnp.where(after, x / size, x),
                lambda x: jnp.where(channel, x * size, x),
            ],
            x,
        )

    def one_rank(key, event, size):
        ordinary = ~jnp.isin(jnp.arange(BLOCK_SIZE), jnp.array(CHANNELS))

        def one_call(carry, call):
            residual, missing = carry
            rank = jax.lax.axis_index(AXIS)
            own = jax.random.fold_in(key, call * settings.ranks + rank)
            x = disturb(jax.random.normal(own, shape), call, event, size, rank)
            y, residual = echo.echo_psum(x, residual, AXIS, config=config)
            missing = missing + (y - jax.lax.psum(x, AXIS))
            error = jnp.mean(jnp.square(missing), axis=-1, where=ordinary)
            return (residual, missing), jnp.sqrt(error)

        residual = echo.init_residual(shape, AXIS, config=config)
        carry = (residual, jnp.zeros(shape))
        return jax.lax.scan(one_call, carry, jnp.arange(settings.calls))[1]

    ranked = jax.vmap(
        one_rank,
        in_axes=(None, None, None),
        out_axes=None,
        axis_name=AXIS,
        axis_size=settings.ranks,
    )
    return jax.jit(ranked)


def run(
    settings: Settings,
    event: Event,
    size: float,
    *,
    bits: int = 4,
    rotate: bool = True,
    feedback: bool = True,
    residual_dtype: str = "bfloat16",
) -> np.ndarray:
    """Error of every block after every call, ``(calls, blocks)``."""
    fmt = echo.WireFormat(bits=bits, block_size=BLOCK_SIZE, rotate=rotate)
    config = echo.EchoConfig(
        format=fmt, min_bytes=0, feedback=feedback, residual_dtype=residual_dtype
    )
    function = compiled(config, dataclasses.replace(settings, sizes=(), bits=()))
    key = jax.random.key(settings.seed)
    return np.asarray(function(key, EVENTS.index(event), size))


def recovery(errors: np.ndarray, event: Event) -> np.ndarray:
    """Calls after the event until each block's error is at its level; -1 for never.

    0 if the call with the event itself leaves no more than that.
    """
    half = len(errors) // 2
    quiet = slice(half // 2, half) if event == "spike" else slice(-half // 2, None)
    level = np.median(errors[quiet], axis=0)
    above = errors[half:] > 2.0 * level
    needed = np.where(above, np.arange(len(above))[:, None], -1).max(axis=0) + 1
    return np.where(needed == len(above), -1, needed)


def figures(
    errors: np.ndarray, event: Event, feedback: bool
) -> dict[str, tuple[float, str]]:
    """Metrics and their units."""
    half = len(errors) // 2
    before = np.median(errors[half // 2 : half])
    found = {
        "peak_error_ratio": (float(errors[half:].max() / before), "1"),
        "final_error_ratio": (float(np.median(errors[-1]) / before), "1"),
    }
    # Channels that stay have no level to go back to; without feedback there is none.
    if feedback and event != "channels":
        needed = recovery(errors, event)
        found["recovered_share"] = (float(np.mean(needed >= 0)), "1")
        if (needed >= 0).all():
            found["recovery_calls"] = (float(needed.max()), "calls")
            found["median_recovery_calls"] = (float(np.median(needed)), "calls")
    return found


def variants(settings: Settings):
    """Keyword arguments of :func:`run` for every way to send."""
    for bits in settings.bits:
        for rotate in (True, False):
            for dtype in ("bfloat16", "float32"):
                yield {"bits": bits, "rotate": rotate, "residual_dtype": dtype}
            yield {"bits": bits, "rotate": rotate, "feedback": False}


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.tiny:
        settings = dataclasses.replace(
            settings, sizes=(1e4,), bits=(4,), blocks=16, ranks=2, calls=16
        )
    writer = RecordWriter(settings.out)
    for kinds in variants(settings):
        for event in EVENTS:
            for size in settings.sizes:
                errors = run(settings, event, size, **kinds)
                feedback = kinds.get("feedback", True)
                found = figures(errors, event, feedback)
                report(writer, settings, event, size, kinds, found)


def report(writer, settings, event, size, kinds, found) -> None:
    """Writes and prints the figures of one run."""
    config = {
        "event": event,
        "size": size,
        "feedback": True,
        **kinds,
        "block_size": BLOCK_SIZE,
        "ranks": settings.ranks,
        "blocks": settings.blocks,
        "calls": settings.calls,
    }
    for metric, (value, unit) in found.items():
        writer.write(
            Record(
                experiment="outliers",
                metric=metric,
                value=value,
                unit=unit,
                seed=settings.seed,
                baseline="before the event" if "ratio" in metric else None,
                config=config,
            )
        )
    text = ", ".join(f"{metric} {value:.3g}" for metric, (value, _) in found.items())
    print(event, f"{size:g}", kinds, text, flush=True)


if __name__ == "__main__":
    main()
