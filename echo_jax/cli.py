"""The ``echo-jax`` command."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
from typing import Annotated, Literal

import tyro

from echo_jax.collectives import explain
from echo_jax.config import EchoConfig
from echo_jax.training.config import TrainConfig

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
            return _explain(command)
        return _train(command)
    except ValueError as error:
        print(f"echo-jax: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("echo-jax: stopped.", file=sys.stderr)
        return 130


def _explain(command: Explain) -> int:
    print(explain(command.shape, command.dtype, command.ranks, command.config))
    return 0


def _train(command: Train) -> int:
    from rich.console import Console

    config = command.config
    mesh = config.mesh
    if command.device == "cpu":
        use_cpu_devices(mesh.size)
    from echo_jax.records import RecordWriter
    from echo_jax.training.loop import compare
    from echo_jax.training.report import plot_curves, summary_table

    console = Console()
    folder = command.out or pathlib.Path("runs", f"train-{config.seed}")
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        raise ValueError(
            f"{metrics} holds a run already: choose another folder with --out, or "
            "remove it."
        )
    console.print(
        f"{config.model.num_layers} layers of width {config.model.width} on a mesh of "
        f"{mesh.data_ranks} data x {mesh.tensor_ranks} tensor ranks; {config.steps} "
        f"steps of {config.data.batch_size} x {config.data.length} bytes for each of "
        f"{', '.join(config.variants)}. Ctrl-C stops and keeps what was measured."
    )
    with _progress(config, console) as advance:
        results, stopped = compare(config, RecordWriter(metrics), advance)
    console.print(summary_table(results, config.model.dtype))
    plot_curves(results, folder / "curves.png")
    console.print(f"Figures in {metrics}, curves in {folder / 'curves.png'}.")
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
    import jax

    jax.config.update("jax_platforms", "cpu")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        if jax.device_count() < count:
            raise ValueError(
                f"{count} CPU devices are needed, JAX is already set up with "
                f"{jax.device_count()}: start a fresh process."
            ) from error


def _progress(config: TrainConfig, console):
    """A context manager around a bar for each variant; calls advance it."""
    from rich import progress

    @contextlib.contextmanager
    def bars():
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

            def advance(variant, done, loss):
                bar.start_task(tasks[variant])
                bar.update(tasks[variant], completed=done, loss=f"{loss:.4f}")

            yield advance

    return bars()


if __name__ == "__main__":
    sys.exit(main())
