"""Training runs that differ in their all-reduces alone, side by side."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from echo_jax.layers.partitioning import Params
from echo_jax.models.traffic import stream_traffic
from echo_jax.records import Record, RecordWriter
from echo_jax.training import data as text_data
from echo_jax.training.config import TrainConfig, Variant
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
    residual_rms: float = 0.0  # owed by senders after the last forward pass
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


def compare(
    config: TrainConfig, writer: RecordWriter, progress: Progress
) -> tuple[list[RunResult], bool]:
    """Trains every variant from the same seed on the same text in the same order.

    Args:
      config: the runs.
      writer: takes each figure as soon as it is measured.
      progress: called after each step.

    Returns:
      The results so far, and whether Ctrl-C stopped the runs early.

    Raises:
      ValueError: before any computation, if text, mesh or sizes do not fit.
    """
    text = text_data.read_text(config.data.path)
    training, heldout = text_data.split_heldout(text, config.data.length)
    mesh = make_mesh(config.mesh)
    results = []
    with Interrupt() as interrupt:
        for variant in config.variants:
            run = _Run(config, variant, mesh, writer)
            results.append(run.result)
            run.train(training, progress, interrupt)
            if interrupt.requested:
                return results, True
            run.evaluate(heldout)
            _write_gap(results, writer, config)
    return results, False


class _Run:
    """One variant: its compiled steps, its state and what it measures."""

    def __init__(
        self, config: TrainConfig, variant: Variant, mesh: Mesh, writer: RecordWriter
    ):
        self.config, self.writer = config, writer
        self.plan = config.plan(variant)
        sent = _traffic(config, variant)
        self.result = RunResult(variant=variant, bytes_per_token=sent)
        optimizer = make_optimizer(config.optimizer, config.steps)
        self.state, parts = create_state(config.model, optimizer, mesh, config.seed)
        self.step = make_train_step(parts, mesh, optimizer, self.plan)
        self.loss = make_eval_step(parts, mesh, self.plan)
        self.batch_sharding = NamedSharding(mesh, PartitionSpec("data"))

    def train(self, text, progress: Progress, interrupt: Interrupt) -> None:
        sizes = self.config.data
        seconds = []
        for index in range(self.config.steps):
            if interrupt.requested:
                break
            start = time.perf_counter()
            batch = text_data.draw_batch(
                text,
                batch_size=sizes.batch_size,
                length=sizes.length,
                seed=self.config.seed,
                step=index,
            )
            self.state, metrics = self.step(self.state, self._place(batch))
            loss = float(metrics.loss)  # waits for the step
            seconds.append(time.perf_counter() - start)
            self.result.losses.append(loss)
            self.result.residual_rms = float(metrics.residual_send)
            if index % self.config.log_every == 0 or index + 1 == self.config.steps:
                self._write("train_loss", loss, "nats", step=index + 1)
            progress(self.result.variant, index + 1, loss)
        if len(seconds) > 1:
            self.result.step_seconds = statistics.median(seconds[1:])

    def evaluate(self, text) -> None:
        sizes, params = self.config.data, self.state.params
        for index in range(sizes.heldout_batches):
            batch = text_data.heldout_batch(
                text, batch_size=sizes.batch_size, length=sizes.length, index=index
            )
            self.result.heldout.append(self._heldout(params, batch))
        result = self.result
        self._write("final_train_loss", result.final_loss, "nats")
        self._write(
            "heldout_loss",
            result.heldout_loss,
            "nats",
            spread=statistics.pstdev(result.heldout),
        )
        self._write("residual_rms", result.residual_rms, "1")
        for collective, sent in result.bytes_per_token.items():
            self._write("bytes_per_token", sent, "B", collective=collective)
        if result.step_seconds is not None:
            self._write("step_seconds", result.step_seconds, "s")

    def _heldout(self, params: Params, batch) -> float:
        return float(self.loss(params, self._place(batch)))

    def _place(self, batch) -> jax.Array:
        return jax.device_put(batch, self.batch_sharding)

    def _write(self, metric, value, unit, *, spread=None, **extra) -> None:
        _write(
            self.writer,
            self.config,
            self.result.variant,
            metric,
            value,
            unit,
            spread=spread,
            **extra,
        )


def _write_gap(results: list[RunResult], writer: RecordWriter, config: TrainConfig):
    """Records the newest run's gap, if there is an exact run to compare with."""
    exact = next((r for r in results if r.variant == "exact"), None)
    newest = results[-1]
    gap = gap_percent(newest, exact)
    if gap is not None and newest is not exact:
        _write(
            writer,
            config,
            newest.variant,
            "heldout_gap_percent",
            gap,
            "%",
            baseline="exact",
        )


def _write(
    writer: RecordWriter,
    config: TrainConfig,
    variant: Variant,
    metric: str,
    value: float,
    unit: str,
    *,
    spread: float | None = None,
    baseline: str | None = None,
    **extra,
) -> None:
    writer.write(
        Record(
            experiment="train",
            metric=metric,
            value=value,
            unit=unit,
            spread=spread,
            baseline=baseline,
            seed=config.seed,
            config={
                "variant": variant,
                "bits": config.format.bits,
                "block_size": config.format.block_size,
                "rotate": config.format.rotate,
                "layers": config.model.num_layers,
                "width": config.model.width,
                "data_ranks": config.mesh.data_ranks,
                "tensor_ranks": config.mesh.tensor_ranks,
                "batch_size": config.data.batch_size,
                "length": config.data.length,
                "steps": config.steps,
                **extra,
            },
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
