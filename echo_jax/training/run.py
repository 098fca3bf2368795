"""The run of one variant: from its first step, or its last checkpoint, to the end."""

import dataclasses
import pathlib
import statistics
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from echo_jax.plan import DepthPlan
from echo_jax.records import RecordWriter
from echo_jax.training.checkpoint import (
    Checkpoints,
    Identity,
    Snapshot,
)
from echo_jax.training.clock import StepClock
from echo_jax.training.config import TrainConfig, Variant
from echo_jax.training.config_file import to_dict
from echo_jax.training.gradient_state import fit_state, residual_rms
from echo_jax.training.metrics import (
    bytes_per_token,
    flops_per_token,
    gradient_bytes,
    signal_to_quantization_db,
)
from echo_jax.training.optimizer import make_optimizer
from echo_jax.training.ranks import AnyMesh
from echo_jax.training.result import RunResult
from echo_jax.training.run_log import Figures, RunLog
from echo_jax.training.source import Feeder, Source
from echo_jax.training.state import (
    TrainState,
    create_state,
    fresh_residual,
    state_shapes,
)
from echo_jax.training.step import (
    StepMetrics,
    make_eval_step,
    make_train_step,
)

Progress = Callable[[Variant, int, float], None]  # variant, steps done, loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Training runs that are ready to start: their inputs are read and checked."""

    config: TrainConfig
    mesh: AnyMesh
    source: Source  # of the batches


class _Call(NamedTuple):
    """What a call of the step function gave, on its way from the device."""

    metrics: StepMetrics
    position: dict[str, Any]  # of the batches, after those of the call
    owed_rms: jax.Array | None  # by the gradient sync, where a record is due


_RESET = (
    "What the gradient sync still owed was of other messages than it sends here: it "
    "was reset to zero. One rounding of a step's gradients is lost."
)


def open_checkpoints(
    runs: Comparison, variant: Variant, folder: pathlib.Path
) -> Checkpoints | None:
    """The checkpoints of one variant; None if none are kept.

    Args:
      runs: from :func:`echo_jax.training.prepare`.
      variant: which all-reduces.
      folder: of the metrics.
    """
    config = runs.config
    if not config.checkpoint.every:
        return None
    identity = Identity(
        config=to_dict(config),
        data=runs.source.checksum,
        ranks={
            "data": config.mesh.data_ranks,
            "tensor": config.mesh.tensor_ranks,
        },
    )
    beside = config.checkpoint.folder or folder / "checkpoints"
    return Checkpoints(beside / variant, keep=config.checkpoint.keep, identity=identity)


class TrainingRun:
    """One variant: its compiled steps, its state and what it measures.

    As a context manager it is closed at the end, or abandoned after an error.

    Args:
      runs: from :func:`echo_jax.training.prepare`.
      variant: how the all-reduces are sent.
      writer: takes the figures; checkpoints go to a folder beside its file, unless the
        configuration names another.
      resume: continue from the newest checkpoint, if there is one.

    Raises:
      ValueError: if the folder holds checkpoints of another run, or none of those to
        go on from can be read.
    """

    def __init__(
        self,
        runs: Comparison,
        variant: Variant,
        *,
        writer: RecordWriter,
        resume: bool = False,
    ):
        """See the class."""
        self.runs, self.config, self.writer = runs, runs.config, writer
        sent = bytes_per_token(self.config, variant)
        self.result = RunResult(variant=variant, bytes_per_token=sent)
        self.notes: tuple[str, ...] = ()  # what resuming changed, in words
        self._skipped = 0  # steps since the last record whose gradient was not finite
        self._plan = self.config.plan(variant)
        self._next: tuple[np.ndarray, dict[str, Any]] | None = None  # batch read ahead
        sizes = self.config.data
        self._feeder = Feeder(runs.mesh, sizes.batch_size)
        rows = self._feeder.rows
        self._batches: Any = runs.source.batches(
            sizes, seed=self.config.seed, rows=rows
        )
        self._checkpoints = open_checkpoints(runs, variant, writer.path.parent)
        if self._checkpoints is not None and not resume:
            self._checkpoints.check(resume=False)
        self.log = RunLog(self.config, variant, writer)
        try:
            self._make_steps()
            self._start(resume)
        except BaseException:
            self.abandon()
            raise

    @property
    def steps_done(self) -> int:
        """Optimizer steps that the state has seen, or will have: some may be running.

        After :meth:`train` the result has the losses of all of them.
        """
        return self._steps_done

    @property
    def is_complete(self) -> bool:
        """Whether all steps are done."""
        return self.steps_done >= self.config.steps

    def train(self, progress: Progress, stop: Callable[[], bool]) -> None:
        """Trains until all steps are done or ``stop`` says so, then saves.

        Args:
          progress: called when the losses of a call of the step function are known,
            while the next one runs, and once at the start of a resumed run.
          stop: asked before each call; must answer the same on all processes.
        """
        if self.steps_done:
            progress(self.result.variant, self.steps_done, self.result.losses[-1])
        running = None
        with StepClock() as clock:
            while not self.is_complete and not stop():
                # The device gets the next call before the host waits for the last.
                before, running = running, self._call(clock)
                if before is not None:
                    self._measure(before, clock, progress)
                if self._nothing_may_run:
                    self._measure(running, clock, progress)
                    running = None
            if running is not None:
                self._measure(running, clock, progress)
        self._save(force=True)
        self._measure_speed(clock)

    def evaluate(self) -> None:
        """Measures the held-out loss and writes the final figures of the run."""
        result = self.result
        result.heldout = self.heldout_losses()
        self.log.write("final_train_loss", result.final_loss, "nats")
        self.log.write(
            "heldout_loss", result.heldout_loss, "nats", spread=result.heldout_spread
        )
        self.log.write("residual_rms", result.residual_rms, "1")
        self.log.write("signal_to_quantization_db", result.signal_db, "dB")
        for collective, sent in result.bytes_per_token.items():
            self.log.write("bytes_per_token", sent, "B", collective=collective)
        sent = gradient_bytes(self.config, self._shapes.params, self._parts.specs)
        for collective, count in sent.items():
            self.log.write("gradient_bytes_per_step", count, "B", collective=collective)

    def close(self) -> None:
        """Waits until checkpoints and figures are on disk."""
        try:
            if self._checkpoints is not None:
                self._checkpoints.close()
        finally:
            self.log.close()

    def abandon(self) -> None:
        """Closes after an error, and waits for no other process: they may have died."""
        try:
            if self._checkpoints is not None:
                self._checkpoints.abandon()
        finally:
            self.log.close()

    def __enter__(self) -> "TrainingRun":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _make_steps(self) -> None:
        config, mesh = self.config, self.runs.mesh
        self._optimizer = make_optimizer(config.optimizer, config.steps)
        self._shapes, self._parts = state_shapes(
            config.model,
            mesh,
            optimizer=self._optimizer,
            seed=config.seed,
            gradients=config.gradient_sync(),
        )
        self.step = make_train_step(
            self._parts,
            mesh,
            optimizer=self._optimizer,
            plan=self._plan,
            accumulate=config.optimizer.accumulate,
            steps_per_call=config.steps_per_call,
        )
        self._loss = make_eval_step(self._parts, mesh, plan=self._plan)
        self._owed_rms = jax.jit(residual_rms)

    def _start(self, resume: bool) -> None:
        """The state as it was left, or a new one."""
        snapshot = None
        if resume and self._checkpoints is not None:
            snapshot = self._checkpoints.restore(self._shapes, self._parts.shardings)
        if snapshot is None:
            self.state, _ = create_state(
                self.config.model,
                self.runs.mesh,
                optimizer=self._optimizer,
                seed=self.config.seed,
                gradients=self.config.gradient_sync(),
            )
            self._saved, self._position, self._steps_done = None, None, 0
            return
        self.state, self.notes = self._on_this_mesh(snapshot)
        self._position = snapshot.position
        self._batches.set_state(snapshot.position)
        self.result.losses = list(snapshot.losses)
        self._saved = self._steps_done = len(snapshot.losses)

    def _on_this_mesh(self, snapshot: Snapshot) -> tuple[TrainState, tuple[str, ...]]:
        """The state, with what data ranks owe fitted to those that are here."""
        state, notes = snapshot.state, snapshot.notes
        if not notes:  # the same mesh: no residual is made only to be dropped
            return state, notes
        fresh = fresh_residual(self._parts, self.runs.mesh, params=state.params)
        if fresh is None:
            return state, notes
        if state.gradient_residual is None:
            return state._replace(gradient_residual=fresh), (*notes, _RESET)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the notes say it
            owed, words = fit_state(state.gradient_residual, fresh)
        notes = notes if words is None else (*notes, words)
        return state._replace(gradient_residual=owed), notes

    def _call(self, clock: StepClock) -> _Call:
        """Starts a call of the step function and waits for nothing."""
        tokens, position = self._next or self._draw()
        clock.start()
        self.state, metrics = self.step(self.state, self._feeder.place(tokens))
        clock.watch(metrics.loss)
        self._steps_done += self.config.steps_per_call
        owed, owed_rms = self.state.gradient_residual, None
        if owed is not None and self._is_logged(self.steps_done):
            owed_rms = self._owed_rms(owed)
        # The next batch is read while the device computes.
        self._next = None if self.is_complete else self._draw()
        return _Call(metrics, position, owed_rms)

    def _measure(self, call: _Call, clock: StepClock, progress: Progress) -> None:
        """Waits for a call and writes down what it gave."""
        metrics, owed_rms = jax.device_get((call.metrics, call.owed_rms))
        metrics = jax.tree.map(np.atleast_1d, metrics)
        clock.stop(metrics.loss.size)
        result, self._position = self.result, call.position
        result.losses += [float(loss) for loss in metrics.loss]
        self._skipped += int(metrics.skipped.sum())
        self._after_call(jax.tree.map(lambda m: m[-1], metrics), owed_rms, clock)
        progress(result.variant, len(result.losses), result.losses[-1])

    def _is_logged(self, done: int) -> bool:
        return done % self.config.log_every == 0 or done >= self.config.steps

    @property
    def _nothing_may_run(self) -> bool:
        """Whether the call that runs must end before anything else is asked for.

        Where the state as it is now is to be saved or evaluated, since the next call
        takes it. And with several processes, which agree on stopping before each call:
        two programs that do not depend on each other and both talk to the other
        processes might do so in a different order in each of them.
        """
        if jax.process_count() > 1:
            return True
        every = (self.config.checkpoint.every, self.config.evaluate_every)
        return any(n and self.steps_done % n == 0 for n in every)

    def _draw(self) -> tuple[np.ndarray, dict[str, Any]]:
        """The tokens of one call, for one step or several, and the position after."""
        count = self.config.steps_per_call
        tokens = [next(self._batches) for _ in range(count)]
        whole = tokens[0] if count == 1 else np.stack(tokens)
        return whole, self._batches.get_state()

    def _after_call(self, metrics: StepMetrics, owed_rms, clock: StepClock) -> None:
        result, config = self.result, self.config
        done, ranks = len(result.losses), config.mesh.tensor_ranks
        result.residual_rms = float(metrics.residual_send)
        result.signal_db = signal_to_quantization_db(
            metrics, config.format, ranks=ranks
        )
        if self._is_logged(done):
            self.log.write_step(self._figures(metrics, owed_rms, clock), done)
        if done != self.steps_done:
            return  # the state is a later one, and nothing was due of this one
        if config.evaluate_every and done % config.evaluate_every == 0:
            loss = statistics.fmean(self.heldout_losses())
            self.log.write_step({"heldout_loss": (loss, "nats")}, done)
        self._save()

    def _figures(self, metrics: StepMetrics, owed_rms, clock: StepClock) -> Figures:
        """What a line of the log says."""
        result, every = self.result, self.config.log_every
        since = (len(result.losses) - 1) % every + 1  # steps since the last line
        figures: Figures = {
            # Of all steps since then: single batches differ more than runs do.
            "train_loss": (statistics.fmean(result.losses[-since:]), "nats"),
            "gradient_norm": (float(metrics.grad_norm), "1"),
            "residual_send_rms": (float(metrics.residual_send), "1"),
            "residual_reduce_rms": (float(metrics.residual_reduce), "1"),
            "skipped": (float(self._skipped), "1"),
        }
        self._skipped = 0
        if owed_rms is not None:
            figures["gradient_residual_rms"] = (float(owed_rms), "1")
        if result.signal_db is not None:
            figures["signal_to_quantization_db"] = (result.signal_db, "dB")
        seconds = clock.lap()
        if seconds is not None:
            tokens = self._tokens_a_step / seconds
            figures["tokens_per_second"] = (tokens, "1/s")
            figures["flops_per_second"] = (tokens * self._flops_a_token, "1/s")
        return figures

    def _save(self, *, force: bool = False) -> None:
        done, every = self.steps_done, self.config.checkpoint.every
        due = force or self.is_complete or (every and done % every == 0)
        if self._checkpoints is None or not due or done in (0, self._saved):
            return
        losses = list(self.result.losses)
        self._checkpoints.save(Snapshot(self.state, self._position or {}, losses))
        self._saved = done

    def heldout_losses(self, plan: DepthPlan | None = None) -> list[float]:
        """The loss of every held-out batch with the parameters as they are now.

        Args:
          plan: of the all-reduces, if not the one that the run trains with.
        """
        sizes, source, rows = self.config.data, self.runs.source, self._feeder.rows
        loss = self._loss
        if plan is not None:
            loss = make_eval_step(self._parts, self.runs.mesh, plan=plan)
        losses = []
        for index in range(sizes.heldout_batches):
            batch = source.heldout_batch(sizes, index=index, rows=rows)
            placed = self._feeder.place(batch)
            losses.append(float(loss(self.state.params, placed)))
        return losses

    def _measure_speed(self, clock: StepClock) -> None:
        result, seconds = self.result, clock.median()
        if seconds is None:
            return
        result.step_seconds = seconds
        result.tokens_per_second = self._tokens_a_step / seconds
        result.flops_per_second = result.tokens_per_second * self._flops_a_token
        self.log.write("step_seconds", seconds, "s")
        self.log.write("tokens_per_second", result.tokens_per_second, "1/s")
        self.log.write("flops_per_second", result.flops_per_second, "1/s")

    @property
    def _tokens_a_step(self) -> int:
        return self.config.data.batch_size * self.config.data.length

    @property
    def _flops_a_token(self) -> float:
        return flops_per_token(self.config.model, self.config.data.length)
