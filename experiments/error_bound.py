"""Does the error stay below its bound, and how far below?

Sums outputs of ``echo_psum`` over simulated ranks and measures how far the sum is from
the exact one: against depth (1 to 1,000 calls), against ranks (2 to 512), and over
formats and distributions of the values. Beside each measurement stand the bound that
holds for every input and the one that holds with high probability, both computed from
the measured peaks in block coordinates.

    python experiments/error_bound.py            # minutes on two CPU cores
    python experiments/error_bound.py --tiny     # seconds, for CI

The plots of the documentation are made from the file that this writes.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import echo_jax as echo
from echo_jax.records import Record, RecordWriter
from echo_jax.wire import blocks as blocking
from echo_jax.wire import (
    gaussian_contraction,
    gaussian_stream_error,
    typical_bound,
)
from echo_jax.wire.rotation import rotate

RESULTS = pathlib.Path(__file__).parent / "results" / "error_bound.jsonl"
AXIS = "tensor"
WIDTH = 512  # values in a row
DEPTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
DEGREES_OF_FREEDOM = 3  # of Student's t: infinite fourth moment
OUTLIER_CHANNELS = 4  # of a row's WIDTH
OUTLIER_SIZE = 100.0  # over the other channels

Distribution = Literal["normal", "student_t", "outlier_channels"]
DISTRIBUTIONS: tuple[Distribution, ...] = ("normal", "student_t", "outlier_channels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    seed: int = 0
    out: pathlib.Path = RESULTS
    tiny: bool = False  # a few cells of a few calls


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: calls of one kind, whose errors are looked at after some of them."""

    sweep: Literal["depth", "ranks", "format"]
    bits: int = 4
    block_size: int = 64
    rotate: bool = True
    ranks: int = 8
    calls: int = 10  # in the run
    values: int = 8192  # in one rank's tensor
    distribution: Distribution = "normal"
    feedback: bool = True
    residual_dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def config(self) -> echo.EchoConfig:
        """The configuration of every call."""
        fmt = echo.WireFormat(
            bits=self.bits, block_size=self.block_size, rotate=self.rotate
        )
        return echo.EchoConfig(
            format=fmt,
            min_bytes=0,
            feedback=self.feedback,
            residual_dtype=self.residual_dtype,
        )

    @property
    def looks(self) -> list[int]:
        """After how many calls the error is recorded."""
        return [d for d in DEPTHS if d < self.calls and self.sweep == "depth"] + [
            self.calls
        ]


def cells(tiny: bool) -> Iterator[Cell]:
    """Every run."""
    calls, values = (20, 1024) if tiny else (1000, 4096)
    for bits in (4,) if tiny else (2, 3, 4, 8):
        for feedback in (True, False):
            yield Cell(
                sweep="depth", bits=bits, feedback=feedback, calls=calls, values=values
            )
    yield Cell(sweep="depth", calls=calls, values=values, residual_dtype="bfloat16")
    for ranks in (2, 16) if tiny else (2, 4, 8, 16, 32, 64, 128, 256, 512):
        # At least a block for each rank.
        yield Cell(
            sweep="ranks",
            ranks=ranks,
            calls=2 if tiny else 4,
            values=1024 if tiny else 32768,
        )
    for bits, block_size, rotated in itertools.product(
        (4,) if tiny else (2, 3, 4, 6, 8),
        (64,) if tiny else (16, 64, 256),
        (True, False),
    ):
        for distribution in DISTRIBUTIONS:
            yield Cell(
                sweep="format",
                bits=bits,
                block_size=block_size,
                rotate=rotated,
                distribution=distribution,
                calls=4 if tiny else 20,
                values=1024 if tiny else 8192,
            )


def draw_normal(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return jax.random.normal(key, shape)


def draw_student_t(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    normal = jax.random.normal(key, (DEGREES_OF_FREEDOM + 1, *shape))
    return normal[0] / jnp.sqrt(jnp.mean(jnp.square(normal[1:]), axis=0))


def draw_outlier_channels(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The same few channels are large in every call."""
    channels = np.arange(OUTLIER_CHANNELS) * (shape[1] // OUTLIER_CHANNELS) + 7
    return jax.random.normal(key, shape).at[:, channels].multiply(OUTLIER_SIZE)


DRAW: dict[Distribution, Callable] = {
    "normal": draw_normal,
    "student_t": draw_student_t,
    "outlier_channels": draw_outlier_channels,
}


@functools.cache
def compiled(cell: Cell) -> Callable[[jax.Array, int], dict[str, jax.Array]]:
    """A jitted ``(key, index of the distribution) -> error and peaks of each call``."""
    config, fmt = cell.config, cell.config.format
    shape = (cell.values // WIDTH, WIDTH)

    def blocks(x):
        return rotate(blocking.to_blocks(x, fmt.block_size, 1)[0], fmt)

    # The newest calls count: an error of k times a call's values is left to the next.
    memory = gaussian_contraction(fmt) ** 2 if cell.feedback else 1.0
    share = 1.0 - memory if cell.feedback else 1.0

    def one_rank(key, kind):
        def one_call(carry, index):
            residual, missing, weighted = carry
            own = jax.random.fold_in(key, index * cell.ranks + jax.lax.axis_index(AXIS))
            branches = [functools.partial(f, shape=shape) for f in DRAW.values()]
            x = jax.lax.switch(kind, branches, own)
            y, residual = echo.echo_psum(x, residual, AXIS, config=config)
            exact = jax.lax.psum(x, AXIS)
            missing = missing + (y - exact)
            peaks = jnp.max(jnp.abs(blocks(x)), axis=-1)
            sum_peaks = jnp.max(jnp.abs(blocks(exact)), axis=-1)
            squares = (jax.lax.pmean(jnp.square(peaks), AXIS), jnp.square(sum_peaks))
            weighted = tuple(
                memory * old + share * new
                for old, new in zip(weighted, squares, strict=True)
            )
            measured = {
                "error": jnp.max(jnp.abs(blocks(missing))),
                "square_error": jnp.mean(jnp.square(missing)),
                "square_sum": jnp.mean(jnp.square(exact)),
                "peak": jax.lax.pmax(jnp.max(peaks), AXIS),
                "sum_peak": jnp.max(sum_peaks),
                "weighted_peak": jnp.sqrt(jnp.max(weighted[0])),
                "weighted_sum_peak": jnp.sqrt(jnp.max(weighted[1])),
            }
            return (residual, missing, weighted), measured

        residual = echo.init_residual(shape, AXIS, config=config)
        zeros = jnp.zeros(cell.values // cell.block_size)
        carry = (residual, jnp.zeros(shape), (zeros, zeros))
        return jax.lax.scan(one_call, carry, jnp.arange(cell.calls))[1]

    return jax.jit(
        jax.vmap(
            one_rank,
            in_axes=(None, None),
            out_axes=None,
            axis_name=AXIS,
            axis_size=cell.ranks,
        )
    )


def run(cell: Cell, seed: int) -> dict[str, np.ndarray]:
    """Error and peaks after each call, in block coordinates."""
    # Distributions share a program.
    function = compiled(dataclasses.replace(cell, distribution="normal"))
    kind = DISTRIBUTIONS.index(cell.distribution)
    return jax.tree.map(np.asarray, function(jax.random.key(seed), kind))


def figures(cell: Cell, measured: dict[str, np.ndarray], calls: int) -> dict:
    """The metrics after some calls, with bounds from the peaks until then."""
    fmt = cell.config.format
    kinds = {
        "ranks": cell.ranks,
        "calls": calls,
        "feedback": cell.feedback,
        "residual_dtype": cell.residual_dtype,
    }
    worst = echo.error_bound(
        fmt,
        peak=float(measured["peak"][:calls].max()),
        sum_peak=float(measured["sum_peak"][:calls].max()),
        **kinds,
    )
    mean = 1.0 if cell.feedback else calls**-0.5
    typical = typical_bound(
        fmt,
        values=cell.values,
        peak=mean * float(measured["weighted_peak"][calls - 1]),
        sum_peak=mean * float(measured["weighted_sum_peak"][calls - 1]),
        **kinds,
    )
    sums = measured["square_sum"][:calls].mean()
    return {
        "measured_error": float(measured["error"][calls - 1]),
        "bound": worst.stream,
        "typical_bound": typical.stream,
        "relative_rms_error": float(
            np.sqrt(measured["square_error"][calls - 1] / sums)
        ),
    }


def summary(rows: list[dict]) -> Iterator[tuple[str, float, dict]]:
    """``(metric, value, config)`` of what the documentation says of all cells."""
    for name in ("bound", "typical_bound"):
        ratios = [row[name] / row["measured_error"] for row in rows]
        yield f"least_{name}_ratio", min(ratios), {"cells": len(rows)}
    gaussian = {"distribution": "normal", "rotate": True, "feedback": True}
    ratios = [
        row["typical_bound"] / row["measured_error"]
        for row in rows
        if all(row[key] == value for key, value in gaussian.items())
    ]
    config = {**gaussian, "cells": len(ratios)}
    yield "most_typical_bound_ratio", max(ratios), config
    errors = {
        (row["bits"], row["residual_dtype"], row["calls"]): row["relative_rms_error"]
        for row in rows
        if row["sweep"] == "depth" and row["feedback"]
    }
    deepest = max(calls for _, _, calls in errors)
    for (bits, dtype, calls), error in errors.items():
        if calls == deepest:
            config = {"bits": bits, "residual_dtype": dtype, "calls": calls}
            yield "error_over_depth_2", error / errors[bits, dtype, 2], config


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    writer = RecordWriter(settings.out)
    rows = []

    def write(metric: str, value: float, config: dict, seed: int) -> None:
        relative = metric == "relative_rms_error"
        writer.write(
            Record(
                experiment="error_bound",
                metric=metric,
                value=value,
                unit="1",
                seed=seed,
                baseline="rms of one exact sum" if relative else None,
                config=config,
            )
        )

    for number, cell in enumerate(cells(settings.tiny)):
        seed = settings.seed + number
        measured = run(cell, seed)
        for calls in cell.looks:
            config = {**dataclasses.asdict(cell), "calls": calls}
            found = figures(cell, measured, calls)
            rows.append({**config, **found})
            for metric, value in found.items():
                write(metric, value, config, seed)
        print(describe(cell, found), flush=True)
    for metric, value, config in summary(rows):
        write(metric, value, config, settings.seed)
        print(metric, f"{value:.3f}", config)


def describe(cell: Cell, found: dict[str, float]) -> str:
    """One line on a run."""
    bound, typical = (
        found[name] / found["measured_error"] for name in ("bound", "typical_bound")
    )
    expected = gaussian_stream_error(cell.config.format)
    return (
        f"{cell.sweep:7}{cell.distribution:17}{cell.bits} bits, block "
        f"{cell.block_size:3} rotate={cell.rotate!s:5} feedback={cell.feedback!s:5} "
        f"{cell.ranks:3} ranks, {cell.calls:4} calls: relative error "
        f"{found['relative_rms_error']:.4f} (Gaussian theory {expected:.4f}), bound "
        f"{bound:.1f}x, typical {typical:.2f}x"
    )


if __name__ == "__main__":
    main()
