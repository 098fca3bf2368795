"""Training runs that differ in their all-reduces alone, side by side."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from echo_jax.models.traffic import stream_traffic
from echo_jax.records import Record, RecordWriter
from echo_jax.training import data as text_data
from echo_jax.training.config import TrainConfig, Variant
from echo_jax.training.data import Tokens
from echo_jax.training.interrupt import Interrupt
from echo_jax.training.state import create_state, make_mesh, make_optimizer
from echo_jax.training.step import make_eval_step, make_train_step

Progress = Callable[[Variant, int, float], None]  # variant, steps done, loss

# The final training loss is the mean over this share of the steps, the last ones.
_FINAL_SHARE = 0.1


@dataclasses.dataclass(kw_only=True)
class RunResult:
    """What one variant measured; partial if the run was stopped."""

    variant: Variant
    losses: list[float] = dataclasses.field(default_factory=list)  # of each step, nats
    heldout: list[float] = dataclasses.field(default_factory=list)  # of each batch
    bytes_per_token: dict[str, float] = dataclasses.field(default_factory=dict)
    residual_rms: float | None = None  # owed by senders after the last forward pass
    step_seconds: float | None = None  # median after the first step

    @property
    def final_loss(self) -> float | None:
        """Mean training loss over the last tenth of the steps; None before any."""
        last = max(1, round(_FINAL_SHARE * len(self.losses)))
        return statistics.fmean(self.losses[-last:]) if self.losses else None

    @property
    def heldout_loss(self) -> float | None:
        """Mean held-out loss; None if the run was stopped before."""
        return statistics.fmean(self.heldout) if self.heldout else None


def gap_percent(result: RunResult, exact: RunResult | None) -> float | None:
    """How far the held-out loss lies above that of the exact run, in percent."""
    if exact is None or exact.heldout_loss is None or result.heldout_loss is None:
        return None
    return 100.0 * (result.heldout_loss / exact.heldout_loss - 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs that are ready to start: every input has been read and checked."""

    config: TrainConfig
    mesh: Mesh
    training: Tokens  # what is trained on
    heldout: Tokens  # what is held out


def prepare(config: TrainConfig) -> Comparison:
    """Reads the text and lays out the mesh. Computes nothing.

    Raises:
      ValueError: if text, mesh or sizes do not fit.
    """
    text = text_data.read_text(config.data.path)
    training, heldout = text_data.split_heldout(text, config.data.length)
    return Comparison(
        config=config,
        mesh=make_mesh(config.mesh),
        training=training,
        heldout=heldout,
    )


def compare(
    runs: Comparison, writer: RecordWriter, progress: Progress
) -> tuple[list[RunResult], bool]:
    """Trains every variant from the same seed on the same text in the same order.

    Args:
      runs: from :func:`prepare`.
      writer: takes each figure as soon as it is measured.
      progress: called after each step.

    Returns:
      The results so far, and whether Ctrl-C stopped the runs early.
    """
    results: list[RunResult] = []
    with Interrupt() as interrupt:
        for variant in runs.config.variants:
            if interrupt.requested:
                break
            run = _Run(runs, variant, writer)
            results.append(run.result)
            run.train(progress, interrupt)
            if not interrupt.requested:
                run.evaluate()
                run.compare_with(results[0])
    return results, interrupt.requested


class _Run:
    """One variant: its compiled steps, its state and what it measures."""

    def __init__(self, runs: Comparison, variant: Variant, writer: RecordWriter):
        config, mesh = runs.config, runs.mesh
        self.runs, self.config, self.writer = runs, config, writer
        sent = _traffic(config, variant)
        self.result = RunResult(variant=variant, bytes_per_token=sent)
        optimizer = make_optimizer(config.optimizer, config.steps)
        self.state, parts = create_state(config.model, optimizer, mesh, config.seed)
        plan = config.plan(variant)
        self.step = make_train_step(parts, mesh, optimizer, plan)
        self.loss = make_eval_step(parts, mesh, plan)
        self.batch_sharding = NamedSharding(mesh, PartitionSpec("data"))

    def train(self, progress: Progress, interrupt: Interrupt) -> None:
        result, seconds = self.result, []
        for index in range(self.config.steps):
            if interrupt.requested:
                break
            start = time.perf_counter()
            batch = text_data.draw_batch(
                self.runs.training,
                sizes=self.config.data,
                seed=self.config.seed,
                step=index,
            )
            self.state, metrics = self.step(self.state, self._place(batch))
            loss = float(metrics.loss)  # waits for the step
            seconds.append(time.perf_counter() - start)
            result.losses.append(loss)
            result.residual_rms = float(metrics.residual_send)
            last = interrupt.requested or index + 1 == self.config.steps
            if last or index % self.config.log_every == 0:
                self._write("train_loss", loss, "nats", step=index + 1)
            progress(result.variant, index + 1, loss)
        if len(seconds) > 1:
            result.step_seconds = statistics.median(seconds[1:])
            self._write("step_seconds", result.step_seconds, "s")

    def evaluate(self) -> None:
        result, sizes = self.result, self.config.data
        for index in range(sizes.heldout_batches):
            batch = text_data.heldout_batch(self.runs.heldout, sizes=sizes, index=index)
            result.heldout.append(
                float(self.loss(self.state.params, self._place(batch)))
            )
        self._write("final_train_loss", result.final_loss, "nats")
        spread = statistics.pstdev(result.heldout)
        self._write("heldout_loss", result.heldout_loss, "nats", spread=spread)
        self._write("residual_rms", result.residual_rms, "1")
        for collective, sent in result.bytes_per_token.items():
            self._write("bytes_per_token", sent, "B", collective=collective)

    def compare_with(self, exact: RunResult) -> None:
        """Records the gap to the first run, if that is the exact one."""
        if self.result is exact or exact.variant != "exact":
            return
        gap = gap_percent(self.result, exact)
        self._write("heldout_gap_percent", gap, "%", baseline="exact")

    def _place(self, batch) -> jax.Array:
        return jax.device_put(batch, self.batch_sharding)

    def _write(
        self, metric: str, value, unit: str, *, spread=None, baseline=None, **extra
    ) -> None:
        chosen = dataclasses.asdict(self.config)
        del chosen["seed"], chosen["variants"]
        self.writer.write(
            Record(
                experiment="train",
                metric=metric,
                value=value,
                unit=unit,
                spread=spread,
                baseline=baseline,
                seed=self.config.seed,
                config={"variant": self.result.variant, **chosen, **extra},
            )
        )


def _traffic(config: TrainConfig, variant: Variant) -> dict[str, float]:
    """Bytes that a rank sends to its tensor group, for each token of its batch."""
    batch = config.data.batch_size // config.mesh.data_ranks
    tokens = batch * config.data.length
    total: dict[str, float] = {}
    for direction in ("forward", "backward"):
        sent = stream_traffic(
            config.model,
            config.plan(variant),
            batch=batch,
            length=config.data.length,
            ranks=config.mesh.tensor_ranks,
            direction=direction,
        )
        for collective, count in sent.items():
            total[collective] = total.get(collective, 0.0) + count / tokens
    return total
