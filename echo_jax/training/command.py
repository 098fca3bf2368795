"""The commands ``echo-jax train`` and ``echo-jax prepare``."""

import argparse
import contextlib
import dataclasses
import functools
import io
import logging
import pathlib
import shlex
import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import jax
import tyro
from rich import progress
from rich.console import Console

from echo_jax.devices import Cluster, Device, use_cpu_devices
from echo_jax.files import Claim
from echo_jax.records import RecordWriter
from echo_jax.training.checkpoint import CheckpointError, CheckpointWarning
from echo_jax.training.config import TrainConfig, Variant
from echo_jax.training.config_file import (
    changed_fields,
    load_config,
    save_config,
    to_dict,
)
from echo_jax.training.loop import Comparison, compare, prepare
from echo_jax.training.prepare_text import PrepareConfig, write_corpus
from echo_jax.training.report import plot_curves, summary_table
from echo_jax.training.run import open_checkpoints

_CONFIG = "config.json"  # of a run, in its folder
_METRICS = "metrics.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Train a small decoder with exact and with 4-bit all-reduces, and compare.

    Without arguments: on the CPU, 2 data x 4 tensor ranks, the source of Python's
    standard library, a few minutes.
    """

    config: tyro.conf.OmitArgPrefixes[TrainConfig] = TrainConfig()
    config_file: Annotated[pathlib.Path | None, tyro.conf.arg(name="config")] = None
    """JSON to take every option from that is not given here, such as the config.json
    of an earlier run."""
    out: pathlib.Path | None = None
    """Folder for metrics.jsonl, curves.png, config.json and checkpoints; default
    runs/train-SEED. A folder that holds a run already is refused."""
    resume: bool = False
    """Go on with the run in the folder, with its configuration, from its newest
    checkpoints; start it if there is none."""
    device: Device = "cpu"
    """cpu simulates as many devices as the mesh has; default takes JAX's own."""
    cluster: tyro.conf.OmitArgPrefixes[Cluster] = Cluster()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareText:
    """Cut a text into tokens, once, for `echo-jax train --data FOLDER`.

    Trains a byte-level BPE tokenizer on the text, or takes one, and writes token ids
    with a manifest, checksums and a part that is held out.
    """

    text: tyro.conf.Positional[pathlib.Path]
    """A file (.txt, .xz, others as text), or a folder of .txt, .md, .rst, .py, .xz."""
    out: pathlib.Path
    """The folder to make."""
    config: tyro.conf.OmitArgPrefixes[PrepareConfig] = PrepareConfig()


def saved_defaults(arguments: list[str]) -> Train:
    """What ``train`` starts from: ``--config FILE``, or the run that is resumed.

    Raises:
      ValueError: if the file is no configuration.
    """
    if arguments[:1] != ["train"]:
        return Train()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--seed", type=int, default=TrainConfig().seed)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            given, _ = parser.parse_known_args(arguments[1:])
    except SystemExit:
        return Train()  # the parser of everything says what is wrong
    file = given.config
    if file is None and given.resume:
        file = _folder(given.out, given.seed) / _CONFIG
        file = file if file.exists() else None
    return Train() if file is None else Train(config=load_config(file))


def prepare_training(command: Train) -> Callable[[], int]:
    """Checks everything that can be wrong; the rest is for the function returned.

    Raises:
      ValueError: saying what is wrong.
    """
    config = command.config
    _set_up_devices(command)
    for variant in config.variants:
        config.plan(variant).check_backends()
    folder = _folder(command.out, config.seed)
    if jax.process_index():
        nothing = contextlib.ExitStack()
        return functools.partial(_train, prepare(config), folder, command, nothing)
    _check_folder(folder, command)
    runs = prepare(config)
    with contextlib.ExitStack() as claims:
        for claimed in _folders(folder, config):
            if claimed.exists() and not claimed.is_dir():
                raise ValueError(f"{claimed} is a file: choose a folder.")
            claimed.mkdir(parents=True, exist_ok=True)
            claims.enter_context(Claim(claimed))
        _check_folder(folder, command)  # once more: nobody else can change it now
        for variant in config.variants:
            checkpoints = open_checkpoints(runs, variant, folder)
            if checkpoints is not None:
                checkpoints.check(resume=command.resume)
        save_config(config, folder / _CONFIG)
        held = claims.pop_all()
    return functools.partial(_train, runs, folder, command, held)


def prepare_text(command: PrepareText) -> Callable[[], int]:
    """Writes the folder; what is returned says what is in it.

    Raises:
      ValueError: if the text cannot be read, or the folder is there.
    """
    columns = (
        progress.TextColumn("{task.description:>10}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, progress.TaskID] = {}

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage)
            bar.update(tasks[stage], completed=done, total=total)

        manifest = write_corpus(
            command.text, command.out, config=command.config, progress=advance
        )
    counts = [
        f"{sum(s.tokens for s in shards):,}"
        for shards in (manifest.training, manifest.heldout)
    ]

    def finish() -> int:
        print(
            f"{counts[0]} tokens to train on and {counts[1]} held out, of "
            f"{manifest.vocab_size:,} kinds, in {command.out}. Next: echo-jax train "
            f"--data {command.out} --vocab-size {manifest.vocab_size}"
        )
        return 0

    return finish


def _set_up_devices(command: Train) -> None:
    """Simulated devices, and the other processes if there are any."""
    cluster, size = command.cluster, command.config.mesh.size
    if cluster.coordinator is None:
        if command.device == "cpu":
            use_cpu_devices(size)
        return
    if command.device == "cpu":
        jax.config.update("jax_platforms", "cpu")  # one device in each process
    cluster.join()
    found = jax.device_count()
    if size != found:
        raise ValueError(
            f"a mesh of {command.config.mesh} takes {size} devices, the processes have "
            f"{found}: every device takes part."
        )


def _check_folder(folder: pathlib.Path, command: Train) -> None:
    """Refuses to write over a run, or to go on with another one."""
    saved = folder / _CONFIG
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: choose a folder with --out.")
    if not command.resume:
        if saved.exists() or (folder / _METRICS).exists():
            raise ValueError(
                f"{folder} holds a run already: choose another folder with --out, "
                "remove it, or go on with --resume."
            )
        return
    if not command.config.checkpoint.every:
        raise ValueError(
            "--resume needs checkpoints: start the run with --checkpoint-every STEPS."
        )
    if saved.exists():
        before = to_dict(load_config(saved))
        changed = changed_fields(before, to_dict(command.config))
        if changed:
            raise ValueError(
                f"the run in {folder} cannot go on with another configuration:\n"
                + "\n".join(f"  {line}" for line in changed)
                + "\nLeave these options out, or start another run."
            )


def _folders(folder: pathlib.Path, config: TrainConfig) -> list[pathlib.Path]:
    """What a run writes to: its folder, and that of its checkpoints if another."""
    checkpoints = config.checkpoint.folder if config.checkpoint.every else None
    if checkpoints is None or checkpoints.resolve() == folder.resolve():
        return [folder]
    return [folder, checkpoints]


def _train(
    runs: Comparison, folder: pathlib.Path, command: Train, claims: contextlib.ExitStack
) -> int:
    """Trains, holding the folders that were claimed until it ends."""
    with claims:
        try:
            return _train_and_report(runs, folder, command)
        except CheckpointError as error:
            print(f"echo-jax: {error}", file=sys.stderr)
            return 2


def _train_and_report(runs: Comparison, folder: pathlib.Path, command: Train) -> int:
    is_first = jax.process_index() == 0
    console, config = Console(quiet=not is_first), runs.config
    unit = runs.source.unit
    console.print(
        f"{config.model.num_layers} layers of width {config.model.width} on a mesh of "
        f"{config.mesh}; {config.steps} steps of {config.data.batch_size} x "
        f"{config.data.length} {unit}s of {runs.source.training_size:,} for each of "
        f"{', '.join(config.variants)}. Ctrl-C stops and keeps what was measured."
    )
    metrics, curves = folder / _METRICS, folder / "curves.png"
    with _progress(config, console) as advance, _shown(console):
        results, stopped = compare(
            runs,
            RecordWriter(metrics),
            progress=advance,
            resume=command.resume,
            notify=console.print,
        )
    console.print(summary_table(results, config.model.dtype, unit=unit))
    console.print(f"Figures in {metrics}{_plotted(metrics, curves, is_first)}.")
    if stopped:
        console.print("Stopped early: a dash marks what was not measured.")
        if config.checkpoint.every:
            console.print(f"Go on: {_resume_command(folder, command)}", soft_wrap=True)
    return 130 if stopped else 0


def _resume_command(folder: pathlib.Path, command: Train) -> str:
    """What goes on with a run; where it runs is not in its configuration."""
    words = f"echo-jax train --out {shlex.quote(str(folder))} --resume"
    if command.device != Train.device:
        words += f" --device {command.device}"
    cluster = command.cluster
    if cluster.coordinator is not None:
        words += f" --coordinator {cluster.coordinator}"
    if cluster.processes is not None:
        words += f" --processes {cluster.processes} --process INDEX"
    return words


def _plotted(metrics: pathlib.Path, curves: pathlib.Path, is_first: bool) -> str:
    """Draws the curves and says where; a full disk costs the picture alone."""
    try:
        if is_first:
            plot_curves(metrics, curves)
    except OSError as error:
        return f"; the curves could not be written ({error.strerror})"
    return f", curves in {curves}"


def _folder(out: pathlib.Path | None, seed: int) -> pathlib.Path:
    return out or pathlib.Path("runs", f"train-{seed}")


@contextlib.contextmanager
def _shown(console: Console):
    """Warnings about checkpoints as lines of their own, above the progress bars."""
    # What orbax logs about them, itself and through asyncio, are long traces that say
    # no more.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.simplefilter("always", CheckpointWarning)

        def show_line(message, category, *place, **kinds) -> None:
            if issubclass(category, CheckpointWarning):
                console.print(f"[bold red]echo-jax:[/] {message}", soft_wrap=True)
            else:
                show(message, category, *place, **kinds)

        warnings.showwarning = show_line
        yield


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
