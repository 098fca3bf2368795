"""The end of a comparison: a table and a picture of the loss curves."""

import math
import pathlib
from collections.abc import Callable

from rich.table import Table

from echo_jax.records import read_records
from echo_jax.training.result import RunResult, gap_percent


def summary_table(results: list[RunResult], dtype: str, *, unit: str = "byte") -> Table:
    """One column for each variant; a dash for what was not measured.

    Args:
      results: one for each variant.
      dtype: of the exact sums.
      unit: what a loss is the mean of, and what text was counted in.
    """
    exact = next((r for r in results if r.variant == "exact"), None)
    whole = sum(exact.bytes_per_token.values()) if exact else 0.0
    table = Table()
    table.add_column("all-reduces")
    for result in results:
        table.add_column(result.variant, justify="right")

    def row(name: str, form: str, value: Callable[[RunResult], float | None]) -> None:
        cells = (value(result) for result in results)
        table.add_row(name, *("-" if v is None else form.format(v) for v in cells))

    row(f"training loss, nats/{unit}", "{:.4f}", lambda r: r.final_loss)
    row(f"held-out loss, nats/{unit}", "{:.4f}", lambda r: r.heldout_loss)
    row("held-out gap to exact", "{:+.2f} %", lambda r: gap_percent(r, exact))
    for name in sorted({op for r in results for op in r.bytes_per_token}):
        label = f"{name.replace('_', '-')}, B/token"
        row(label, "{:,.0f}", lambda r, op=name: r.bytes_per_token.get(op))
    if whole:
        row(
            f"bytes sent, of exact ({dtype})",
            "{:.3f}",
            lambda r: sum(r.bytes_per_token.values()) / whole,
        )
    row("residual norm (rms)", "{:.2g}", lambda r: r.residual_rms)
    row("signal to quantization, dB", "{:.1f}", lambda r: r.signal_db)
    row("time a step, s", "{:.3f}", lambda r: r.step_seconds)
    row(f"{unit}s of text a second", "{:,.0f}", lambda r: r.tokens_per_second)
    row("TFLOP/s", "{:.3f}", lambda r: _tera(r.flops_per_second))
    return table


def _tera(value: float | None) -> float | None:
    return None if value is None else value / 1e12


def plot_curves(metrics: pathlib.Path, path: pathlib.Path) -> None:
    """Draws what a run's ``metrics.jsonl`` holds, complete or not.

    Left the training loss, each point the mean since the one before it, and dashed the
    held-out losses measured on the way; right how far the curves lie above the exact
    run's.

    Args:
      metrics: the file.
      path: the picture to write; its suffix says which kind.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    training = read_curves(metrics, "train_loss")
    heldout = read_curves(metrics, "heldout_loss")
    exact, unit = training.get("exact", {}), _unit(metrics)
    for index, (variant, losses) in enumerate(training.items()):
        color = f"C{index}"
        left.plot([*losses], [*losses.values()], color, label=variant)
        measured = heldout.get(variant, {})
        left.plot([*measured], [*measured.values()], color, linestyle="--")
        if exact and variant != "exact":
            both = [step for step in losses if step in exact]
            gaps = [100 * (losses[step] / exact[step] - 1) for step in both]
            right.plot(both, gaps, color, label=variant)
    left.set(xlabel="step", ylabel=f"training loss, nats a {unit}", yscale="log")
    right.set(xlabel="step", ylabel="above exact, %")
    right.axhline(0.0, color="black", linewidth=0.5)
    for axis in (left, right):
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    figure.savefig(path, dpi=150)


def read_curves(metrics: pathlib.Path, metric: str) -> dict[str, dict[int, float]]:
    """One metric over the steps, by variant, from a run's ``metrics.jsonl``.

    A step that is there twice, because a run went on from a checkpoint before it,
    counts once. A value that was not finite is NaN.
    """
    curves: dict[str, dict[int, float]] = {}
    for record in _records(metrics):
        config = record["config"]
        if record["metric"] == metric and "step" in config:
            curve = curves.setdefault(config["variant"], {})
            value = record["value"]
            curve[config["step"]] = math.nan if value is None else value
    return {name: dict(sorted(curve.items())) for name, curve in curves.items()}


def _records(metrics: pathlib.Path) -> list[dict]:
    return read_records(metrics) if metrics.exists() else []


def _unit(metrics: pathlib.Path) -> str:
    """Of what a loss is the mean: bytes, unless the text was prepared."""
    sizes = {r["config"]["model"]["vocab_size"] for r in _records(metrics)}
    return "byte" if sizes <= {256} else "token"
