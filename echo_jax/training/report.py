"""The end of a comparison: a table and a picture of the loss curves."""

import pathlib
from collections.abc import Callable

import numpy as np
from rich.table import Table

from echo_jax.training.loop import RunResult, gap_percent

_SMOOTHING_STEPS = 10


def summary_table(results: list[RunResult], dtype: str) -> Table:
    """One column for each variant; a dash for what was not measured.

    ``dtype`` is that of the exact sums.
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

    row("training loss, nats/byte", "{:.4f}", lambda r: r.final_loss)
    row("held-out loss, nats/byte", "{:.4f}", lambda r: r.heldout_loss)
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
    row("time a step, s", "{:.3f}", lambda r: r.step_seconds)
    return table


def plot_curves(results: list[RunResult], path: pathlib.Path) -> None:
    """Writes the loss of every step, smoothed, and its gap to the exact run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    curves, gaps = figure.subplots(1, 2)
    exact = next((r for r in results if r.variant == "exact" and r.losses), None)
    for result in results:
        loss = _smooth(result.losses)
        curves.plot(np.arange(1, loss.size + 1), loss, label=result.variant)
        if exact is not None and result is not exact:
            both = min(loss.size, len(exact.losses))
            gap = 100 * (loss[:both] / _smooth(exact.losses)[:both] - 1)
            gaps.plot(np.arange(1, both + 1), gap, label=result.variant)
    curves.set(xlabel="step", ylabel="training loss, nats a byte", yscale="log")
    gaps.set(xlabel="step", ylabel="above exact, %")
    gaps.axhline(0.0, color="black", linewidth=0.5)
    for axis in (curves, gaps):
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    figure.savefig(path, dpi=150)


def _smooth(losses: list[float]) -> np.ndarray:
    """Mean over the last few steps, over fewer at the start."""
    total = np.cumsum(np.concatenate([[0.0], losses]))
    stop = np.arange(1, len(losses) + 1)
    start = np.maximum(0, stop - _SMOOTHING_STEPS)
    return (total[stop] - total[start]) / (stop - start)
