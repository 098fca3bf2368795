"""The ``echo-jax`` command."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Annotated, Literal

import jax
import tyro
from rich import progress
from rich.console import Console

from echo_jax.collectives import explain
from echo_jax.config import EchoConfig
from echo_jax.records import RecordWriter
from echo_jax.training.config import TrainConfig, Variant
from echo_jax.training.loop import Comparison, compare, prepare
from echo_jax.training.report import plot_curves, summary_table

Device = Literal["cpu", "default"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Train a small decoder with exact and with 4-bit all-reduces, and compare.

    Without arguments: on the CPU, 2 data x 4 tensor ranks, the source of Python's
    standard library, a few minutes.
    """

    config: tyro.conf.OmitArgPrefixes[TrainConfig] = TrainConfig()
    out: pathlib.Path | None = None
    """Folder for metrics.jsonl and curves.png; default runs/train-SEED. A folder that
    holds a run already is refused."""
    device: Device = "cpu"
    """cpu simulates as many devices as the mesh has; default takes JAX's own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explain:
    """Say which path an echo_psum takes for a shape, and what it sends."""

    shape: tyro.conf.Positional[tuple[int, ...]]
    """Shape of a rank's tensor."""
    ranks: int = 8
    """Ranks on the axis."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the tensor."""
    config: tyro.conf.OmitArgPrefixes[EchoConfig] = EchoConfig()


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Explain, tyro.conf.subcommand("explain")]
)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    0 for success, 2 for a wrong argument, 130 when Ctrl-C stopped the run; what was
    measured until then is kept.
    """
    try:
        command = tyro.cli(Command, prog="echo-jax", args=arguments)
        if isinstance(command, Explain):
            finish = _explain(command)
        else:
            finish = _prepare_training(command)
    except (ValueError, OSError) as error:
        print(f"echo-jax: {error}", file=sys.stderr)
        return 2
    try:
        return finish()
    except KeyboardInterrupt:
        print("echo-jax: stopped.", file=sys.stderr)
        return 130


def _explain(command: Explain) -> Callable[[], int]:
    if not command.shape:
        raise ValueError("explain needs a shape, such as: echo-jax explain 8 4096")
    text = str(explain(command.shape, command.dtype, command.ranks, command.config))

    def finish() -> int:
        print(text)
        return 0

    return finish


def _prepare_training(command: Train) -> Callable[[], int]:
    """Checks everything that can be wrong; the rest is for the function returned."""
    config = command.config
    if command.device == "cpu":
        use_cpu_devices(config.mesh.size)
    folder = command.out or pathlib.Path("runs", f"train-{config.seed}")
    if (folder / "metrics.jsonl").exists():
        raise ValueError(
            f"{folder} holds a run already: choose another folder with --out, or "
            "remove it."
        )
    runs = prepare(config)
    folder.mkdir(parents=True, exist_ok=True)
    return functools.partial(_train, runs, folder)


def _train(runs: Comparison, folder: pathlib.Path) -> int:
    console, config = Console(), runs.config
    console.print(
        f"{config.model.num_layers} layers of width {config.model.width} on a mesh of "
        f"{config.mesh.data_ranks} data x {config.mesh.tensor_ranks} tensor ranks; "
        f"{config.steps} steps of {config.data.batch_size} x {config.data.length} "
        f"bytes of {runs.training.size:,} for each of {', '.join(config.variants)}. "
        "Ctrl-C stops and keeps what was measured."
    )
    metrics, curves = folder / "metrics.jsonl", folder / "curves.png"
    with _progress(config, console) as advance:
        results, stopped = compare(runs, RecordWriter(metrics), advance)
    console.print(summary_table(results, config.model.dtype))
    plot_curves(results, curves)
    console.print(f"Figures in {metrics}, curves in {curves}.")
    if stopped:
        console.print("Stopped by Ctrl-C: a dash marks what was not measured.")
    return 130 if stopped else 0


def use_cpu_devices(count: int) -> None:
    """Makes the CPU look like ``count`` devices. Before any computation.

    Raises:
      ValueError: if JAX has been set up with fewer.
    """
    # With fewer threads than devices the ranks' rendezvous can dead-lock.
    os.environ.setdefault("NPROC", str(max(16, 2 * count)))
    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        if jax.device_count() < count:
            raise ValueError(
                f"{count} CPU devices are needed, JAX is already set up with "
                f"{jax.device_count()}: start a fresh process."
            ) from error


@contextlib.contextmanager
def _progress(config: TrainConfig, console: Console):
    """A bar for each variant; yields the function that advances them."""
    columns = (
        progress.TextColumn("{task.description:>12}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("loss {task.fields[loss]}"),
    )
    with progress.Progress(*columns, console=console) as bar:
        new = functools.partial(bar.add_task, total=config.steps, loss="-")
        tasks = {name: new(name, start=False) for name in config.variants}

        def advance(variant: Variant, done: int, loss: float) -> None:
            bar.start_task(tasks[variant])
            bar.update(tasks[variant], completed=done, loss=f"{loss:.4f}")

        yield advance


if __name__ == "__main__":
    sys.exit(main())
