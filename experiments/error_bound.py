"""Does the error stay below its bound, and how far below?

Sums outputs of ``echo_psum`` over simulated ranks and measures how far the sum is from
the exact one: against depth (1 to 1,000 calls), against ranks (2 to 512), and over
formats and distributions of the values. Beside each measurement stand the bound that
holds for every input and the one that holds with high probability, both computed from
the measured peaks in block coordinates.

    python experiments/error_bound.py            # minutes on two CPU cores
    python experiments/error_bound.py --tiny     # seconds, for CI

With a checkpoint, what the ranks of a real model add in each of its all-reduces is
summed too, in order of depth, the model run on the first tokens of a text:

    python experiments/error_bound.py --model SmolLM2-135M-Instruct.Q4_1.gguf \
        --text austen.txt.xz --model-ranks 3

The plots of the documentation are made from the file that this writes.
"""

import dataclasses
import functools
import itertools
import lzma
import pathlib
from collections.abc import Callable, Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import echo_jax as echo
from echo_jax.config import ResidualDtype
from echo_jax.devices import use_cpu_devices
from echo_jax.models import load, load_tokenizer
from echo_jax.models.partial_sums import partial_sums
from echo_jax.records import Record, RecordWriter
from echo_jax.training.data import read_text
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

Distribution = Literal["normal", "student_t", "outlier_channels", "activations"]
DISTRIBUTIONS: tuple[Distribution, ...] = ("normal", "student_t", "outlier_channels")
BOUNDS = ("bound", "typical_bound")
Measured = dict[str, np.ndarray]  # by name, one row a call


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured."""

    seed: int = 0
    out: pathlib.Path = RESULTS
    tiny: bool = False  # a few cells of a few calls
    # Checkpoint of a Llama or Qwen3, whose activations are summed too.
    model: pathlib.Path | None = None
    model_ranks: int = 3  # that its sums are cut into
    text: pathlib.Path | None = None  # that it reads; None for source code of Python
    tokens: int = 256  # of the text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: calls of one kind, whose errors are looked at after some of them."""

    sweep: Literal["depth", "ranks", "format", "activations"]
    bits: int = 4
    block_size: int = 64
    rotate: bool = True
    ranks: int = 8
    calls: int = 10  # in the run
    values: int = 8192  # in one rank's tensor
    distribution: Distribution = "normal"
    feedback: bool = True
    residual_dtype: ResidualDtype = "float32"

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
        deep = self.sweep in ("depth", "activations")
        return [d for d in DEPTHS if deep and d < self.calls] + [self.calls]


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
    # Last, so that the seeds of the others stay what they were.
    for dtype in ("int8", "int4"):
        yield Cell(sweep="depth", calls=calls, values=values, residual_dtype=dtype)


def activation_cells(sums: jax.Array, tiny: bool) -> Iterator[Cell]:
    """Runs over partial sums ``(calls, ranks, tokens, width)`` of a model."""
    calls, ranks, *shape = sums.shape
    cell = Cell(
        sweep="activations",
        distribution="activations",
        ranks=ranks,
        calls=calls,
        values=int(np.prod(shape)),
    )
    for bits, rotated in itertools.product(
        (4,) if tiny else (2, 3, 4, 8), (True, False)
    ):
        yield dataclasses.replace(cell, bits=bits, rotate=rotated)
    for rotated in (True, False):
        yield dataclasses.replace(cell, rotate=rotated, feedback=False)
    for dtype in ("bfloat16", "int8", "int4"):
        yield dataclasses.replace(cell, residual_dtype=dtype)


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


def read_activations(settings: Settings) -> jax.Array | None:
    """Partial sums ``(calls, ranks, tokens, width)`` of a model; None without one."""
    if settings.model is None:
        return None
    use_cpu_devices(settings.model_ranks)
    mesh = jax.make_mesh((settings.model_ranks,), ("tensor",))
    model = load(settings.model, mesh, dtype="float32")
    text = read_text(settings.text).tobytes()
    if settings.text is not None and settings.text.suffix == ".xz":
        text = lzma.LZMADecompressor().decompress(text)  # a part will do
    # No token is longer than this.
    start = text[: 64 * settings.tokens].decode(errors="ignore")
    tokens = load_tokenizer(settings.model).encode(start)[: settings.tokens]
    if len(tokens) < settings.tokens:
        raise ValueError(
            f"the text has {len(tokens)} tokens, --tokens asks for {settings.tokens}: "
            "give a longer --text."
        )
    sums = partial_sums(model, np.asarray([tokens]))
    # To one device, on which ranks are simulated.
    return jnp.asarray(np.asarray(sums)[:, :, 0])


def one_rank(cell: Cell, value_of: Callable, items) -> Measured:
    """Sums of one rank: error and peaks of each block of each call.

    Args:
      cell: configuration of the calls.
      value_of: this rank's tensor from an entry of ``items``.
      items: one entry for each call.
    """
    config, fmt = cell.config, cell.config.format

    def blocks(x):
        return rotate(blocking.to_blocks(x, fmt.block_size, 1)[0], fmt)

    def one_call(carry, item):
        residual, missing = carry
        x = value_of(item)
        y, residual = echo.echo_psum(x, residual, AXIS, config=config)
        exact = jax.lax.psum(x, AXIS)
        missing = missing + (y - exact)
        peaks = jnp.max(jnp.abs(blocks(x)), axis=-1)
        measured = {
            "error": jnp.max(jnp.abs(blocks(missing)), axis=-1),
            "square_error": jnp.mean(jnp.square(missing)),
            "square_sum": jnp.mean(jnp.square(exact)),
            "peak": jax.lax.pmax(peaks, AXIS),
            "square_peak": jax.lax.pmean(jnp.square(peaks), AXIS),
            "sum_peak": jnp.max(jnp.abs(blocks(exact)), axis=-1),
        }
        return (residual, missing), measured

    like = jax.eval_shape(value_of, jax.tree.map(lambda leaf: leaf[0], items))
    residual = echo.init_residual(like, AXIS, config=config)
    return jax.lax.scan(one_call, (residual, jnp.zeros(like.shape)), items)[1]


@functools.cache
def compiled(cell: Cell) -> Callable[[jax.Array, int], Measured]:
    """A jitted ``(key, index of the distribution) -> what is measured``."""
    shape = (cell.values // WIDTH, WIDTH)
    branches = [functools.partial(draw, shape=shape) for draw in DRAW.values()]

    def rank(key, kind):
        def draw(index):
            own = jax.random.fold_in(key, index * cell.ranks + jax.lax.axis_index(AXIS))
            return jax.lax.switch(kind, branches, own)

        return one_rank(cell, draw, jnp.arange(cell.calls))

    return on_ranks(rank, cell, in_axes=(None, None))


def on_ranks(function: Callable, cell: Cell, in_axes: tuple) -> Callable:
    """The function on simulated ranks, which all return the same."""
    ranked = jax.vmap(
        function,
        in_axes=in_axes,
        out_axes=None,
        axis_name=AXIS,
        axis_size=cell.ranks,
    )
    return jax.jit(ranked)


def run(cell: Cell, seed: int, sums: jax.Array | None = None) -> Measured:
    """Error and peaks after each call, in block coordinates.

    Args:
      cell: what is run.
      seed: of what is drawn.
      sums: what is summed where nothing is drawn.
    """
    if cell.distribution == "activations":
        walk = functools.partial(one_rank, cell, lambda x: x)
        return jax.tree.map(np.asarray, on_ranks(walk, cell, in_axes=(1,))(sums))
    # Distributions share a program.
    function = compiled(dataclasses.replace(cell, distribution="normal"))
    kind = DISTRIBUTIONS.index(cell.distribution)
    return jax.tree.map(np.asarray, function(jax.random.key(seed), kind))


def expected_peak(cell: Cell, squares: np.ndarray) -> np.ndarray:
    """Root mean square peak of each block over the calls that its error stems from.

    The newest calls count: an error of k times a call's values is left to the next.
    Without feedback all count alike; where storage loses something, they do as well.
    """
    every = np.sqrt(squares.mean(axis=0))
    if not cell.feedback:
        return every
    memory = gaussian_contraction(cell.config.format) ** 2
    newest = np.zeros_like(squares[0])
    for square in squares:
        newest = memory * newest + (1.0 - memory) * square
    newest = np.sqrt(newest)
    return newest if cell.residual_dtype == "float32" else np.maximum(newest, every)


def least_ratio(bounds: Callable, peaks: dict[str, np.ndarray], error) -> float:
    """The least of bound over error in all blocks, each with its own peaks."""
    own = bounds(peak=1.0, sum_peak=0.0).stream * peaks["peak"]
    owner = bounds(peak=0.0, sum_peak=1.0).stream * peaks["sum_peak"]
    # The worst case adds magnitudes, the typical one variances.
    whole = own + owner if bounds.func is echo.error_bound else np.hypot(own, owner)
    return float(np.min(whole[error > 0] / error[error > 0]))


def figures(cell: Cell, measured: Measured, calls: int) -> dict[str, float]:
    """The metrics after some calls, with bounds from the peaks until then."""
    kinds = {
        "fmt": cell.config.format,
        "ranks": cell.ranks,
        "calls": calls,
        "feedback": cell.feedback,
        "residual_dtype": cell.residual_dtype,
    }
    largest = {
        name: measured[name][:calls].max(axis=0) for name in ("peak", "sum_peak")
    }
    expected = {
        "peak": expected_peak(cell, measured["square_peak"][:calls]),
        "sum_peak": expected_peak(cell, measured["sum_peak"][:calls] ** 2),
    }
    worst = functools.partial(echo.error_bound, **kinds)
    typical = functools.partial(typical_bound, values=cell.values, **kinds)
    error = measured["error"][calls - 1]
    sums = measured["square_sum"][:calls].mean()
    found = {
        "measured_error": float(error.max()),
        "bound": worst(**{k: float(v.max()) for k, v in largest.items()}).stream,
        "typical_bound": typical(
            **{k: float(v.max()) for k, v in expected.items()}
        ).stream,
        "relative_rms_error": float(
            np.sqrt(measured["square_error"][calls - 1] / sums)
        ),
    }
    if cell.sweep == "activations":
        # One block outweighs all others there.
        found["block_bound_ratio"] = least_ratio(worst, largest, error)
        found["block_typical_bound_ratio"] = least_ratio(typical, expected, error)
    return found


def summary(rows: list[dict]) -> Iterator[tuple[str, float, dict]]:
    """``(metric, value, config)`` of what the documentation says of all cells."""
    real = [row for row in rows if row["sweep"] == "activations"]
    for name in BOUNDS:
        ratios = [row[name] / row["measured_error"] for row in rows]
        yield f"least_{name}_ratio", min(ratios), {"cells": len(rows)}
        if real:
            least = min(row[f"block_{name}_ratio"] for row in real)
            yield f"least_block_{name}_ratio", least, {"cells": len(real)}
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

    sums = read_activations(settings)
    runs = list(cells(settings.tiny))
    if sums is None:
        print("No --model: real activations are left out.")
    else:
        runs += activation_cells(sums, settings.tiny)
    for number, cell in enumerate(runs):
        seed = settings.seed + number
        measured = run(cell, seed, sums)
        for calls in cell.looks:
            config = {**dataclasses.asdict(cell), "calls": calls}
            if cell.sweep == "activations":
                config |= source(settings)
            found = figures(cell, measured, calls)
            rows.append({**config, **found})
            for metric, value in found.items():
                write(metric, value, config, seed)
        print(describe(cell, found), flush=True)
    for metric, value, config in summary(rows):
        write(metric, value, config, settings.seed)
        print(metric, f"{value:.3f}", config)


def source(settings: Settings) -> dict[str, str | int]:
    """What the activations are those of."""
    text = "Python" if settings.text is None else settings.text.name
    assert settings.model is not None
    return {"model": settings.model.stem, "text": text, "tokens": settings.tokens}


def describe(cell: Cell, found: dict[str, float]) -> str:
    """One line on a run."""
    bound, typical = (found[name] / found["measured_error"] for name in BOUNDS)
    expected = gaussian_stream_error(cell.config.format)
    return (
        f"{cell.sweep:12}{cell.distribution:17}{cell.bits} bits, block "
        f"{cell.block_size:3} rotate={cell.rotate!s:5} feedback={cell.feedback!s:5} "
        f"{cell.residual_dtype:9}{cell.ranks:3} ranks, {cell.calls:4} calls: error "
        f"{found['relative_rms_error']:.4f} (Gaussian theory {expected:.4f}), bound "
        f"{bound:.1f}x, typical {typical:.2f}x"
    )


if __name__ == "__main__":
    main()
