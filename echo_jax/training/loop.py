"""Training runs that differ in their all-reduces alone, side by side."""

from collections.abc import Callable

from echo_jax.records import RecordWriter
from echo_jax.training.agreement import largest
from echo_jax.training.config import TrainConfig
from echo_jax.training.interrupt import Interrupt
from echo_jax.training.ranks import make_mesh
from echo_jax.training.result import RunResult, gap_percent, gap_spread_percent
from echo_jax.training.run import Comparison, Progress, TrainingRun
from echo_jax.training.run_log import RunLog, check_tensorboard
from echo_jax.training.source import open_source


def prepare(config: TrainConfig) -> Comparison:
    """Reads the text and makes the mesh. Computes nothing on the device.

    Raises:
      ValueError: if text, mesh or sizes do not fit.
    """
    if config.tensorboard:
        check_tensorboard()
    source = open_source(config)
    return Comparison(config=config, mesh=make_mesh(config.mesh), source=source)


def compare(
    runs: Comparison,
    writer: RecordWriter,
    *,
    progress: Progress,
    resume: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> tuple[list[RunResult], bool]:
    """Trains every variant from the same seed on the same text in the same order.

    Args:
      runs: from :func:`prepare`.
      writer: takes each figure as soon as it is measured.
      progress: called after each step.
      resume: continue from the newest checkpoints; a variant that is complete is only
        evaluated.
      notify: called with a sentence where a run is continued, and for each thing that
        continuing it changed.

    Returns:
      The results so far, and whether Ctrl-C (or SIGTERM) stopped the runs early.
    """
    results: list[RunResult] = []
    logs: list[RunLog] = []  # of the variants that are complete
    with Interrupt() as interrupt:
        stop = _agreed(lambda: interrupt.requested)
        for variant in runs.config.variants:
            with TrainingRun(runs, variant, writer=writer, resume=resume) as run:
                results.append(run.result)
                if run.steps_done:
                    notify(f"{variant}: goes on after step {run.steps_done}.")
                for note in run.notes:
                    notify(f"{variant}: {note}")
                run.train(progress, stop)
                if run.is_complete:
                    run.evaluate()
                    logs.append(run.log)
                    _record_gaps(results, logs)
            if not run.is_complete:
                return results, True
    return results, False


def _record_gaps(results: list[RunResult], logs: list[RunLog]) -> None:
    """Records the gap to the exact run: of the last run, or of all if it is that."""
    exact = next((result for result in results if result.variant == "exact"), None)
    first = 0 if results[-1] is exact else len(results) - 1
    for result, log in list(zip(results, logs, strict=True))[first:]:
        if exact is None or result is exact:
            continue
        gap, spread = (f(result, exact) for f in (gap_percent, gap_spread_percent))
        log.write("heldout_gap_percent", gap, "%", spread=spread, baseline="exact")


def _agreed(requested: Callable[[], bool]) -> Callable[[], bool]:
    """Stops all processes after the same step: one that goes on alone would hang."""
    return lambda: bool(largest(int(requested())))
