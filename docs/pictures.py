"""Pictures of the documentation, as SVG: plots from JSON lines, and the wire format.

python docs/pictures.py FOLDER    # writes all of them
"""

import pathlib
import sys

import benchmark_tables
import results
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from echo_jax import WireFormat

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "experiments"))

import plot_bench_network

_KINDS = {
    "normal": "normal",
    "student_t": "Student's t",
    "outlier_channels": "outlier channels",
}


def _figure(columns: int = 1, height: float = 3.6) -> tuple[Figure, list]:
    figure = Figure(figsize=(4.6 * columns, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, list(axes)


def _save(figure: Figure, path: pathlib.Path) -> None:
    for axis in figure.axes:
        if not axis.has_data():
            axis.text(0.5, 0.5, "not measured yet")
            axis.set(xscale="linear", yscale="linear")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def _cells(folder: pathlib.Path, sweep: str) -> list[dict]:
    """Every measured cell of a sweep: its configuration and its metrics."""
    cells: dict[str, dict] = {}
    for record in results.read(folder, "error_bound.jsonl"):
        config = record["config"]
        if config.get("sweep") == sweep:
            cell = cells.setdefault(str(config), dict(config))
            cell[record["metric"]] = record["value"]
    return list(cells.values())


def depth(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Relative error of the stream against the number of calls."""
    figure, (axis,) = _figure()
    cells = [c for c in _cells(folder, "depth") if c["residual_dtype"] == "float32"]
    for number, bits in enumerate(sorted({c["bits"] for c in cells})):
        for feedback in (True, False):
            line = sorted(
                (c["calls"], c["relative_rms_error"])
                for c in cells
                if c["bits"] == bits and c["feedback"] == feedback
            )
            axis.plot(
                *zip(*line, strict=True),
                "-o" if feedback else "--",
                color=f"C{number}",
                markersize=3,
                label=f"{bits} bits" if feedback else None,
            )
    if cells:
        axis.plot([], [], "k--", label="no feedback")
    axis.set(
        xscale="log",
        yscale="log",
        xlabel="calls",
        ylabel="rms error of the stream\nover one exact output",
    )
    if cells:
        axis.legend(fontsize="small")
    _save(figure, path)


def ranks(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Measured maximum and both bounds against the number of ranks."""
    figure, (axis,) = _figure()
    cells = sorted(_cells(folder, "ranks"), key=lambda c: c["ranks"])
    x = [c["ranks"] for c in cells]
    for metric, label in (
        ("bound", "worst case"),
        ("typical_bound", "typical bound"),
        ("measured_error", "measured maximum"),
    ):
        axis.plot(x, [c[metric] for c in cells], "-o", markersize=3, label=label)
    axis.set(xlabel="ranks", ylabel="error in block coordinates")
    if cells:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
    if cells:
        axis.legend(fontsize="small")
    _save(figure, path)


def formats(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Measured maximum against the bounds, every format and distribution."""
    figure, axes = _figure(2)
    cells = _cells(folder, "format")
    for axis, metric in zip(axes, ("bound", "typical_bound"), strict=True):
        for number, (kind, label) in enumerate(_KINDS.items()):
            for rotate in (True, False):
                points = [
                    (c["measured_error"], c[metric] / c["measured_error"])
                    for c in cells
                    if c["distribution"] == kind and c["rotate"] == rotate
                ]
                if points:
                    axis.plot(
                        *zip(*points, strict=True),
                        "o" if rotate else "x",
                        color=f"C{number}",
                        markersize=4,
                        label=f"{label}, {'rotated' if rotate else 'not rotated'}",
                    )
        axis.axhline(1.0, color="black", linewidth=0.7)
        axis.set(xscale="log", yscale="log", xlabel="measured maximum")
    axes[0].set_ylabel("worst case / measured")
    axes[1].set_ylabel("typical bound / measured")
    axes[1].axhline(3.0, color="black", linewidth=0.7, linestyle=":")
    if cells:
        axes[0].legend(fontsize="x-small")
    _save(figure, path)


_SERIES = {
    "uniform": "-o",
    "no feedback": "--o",
    "uniform, exact last": "-s",
    "edges": "^",
    "sensitivity": "-o",
    "sensitivity, no feedback": "--o",
    "searched": "*",
}


def frontier(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Divergence on prose against bits a value, one series a kind of plan."""
    cells = benchmark_tables.frontier(results.read(folder, "benchmark_parity.jsonl"))
    sizes = sorted({cell["block_size"] for cell in cells}, reverse=True) or [64]
    figure, axes = _figure(len(sizes), height=4.2)
    for axis in axes[1:]:
        axis.sharey(axes[0])
    for axis, size in zip(axes, sizes, strict=True):
        for number, (kind, style) in enumerate(_SERIES.items()):
            points = [
                (cell["bits"], cell["kl"])
                for cell in cells
                if cell["block_size"] == size
                and (cell["plan"] == kind or cell["plan"].startswith(f"{kind} "))
            ]
            if points:
                x, y = zip(*points, strict=True)
                axis.plot(
                    x, y, style, color=f"C{number}", markersize=4, label=f"{kind}"
                )
        axis.set(xlabel="bits a value", title=f"blocks of {size}", yscale="log")
    axes[0].set_ylabel("KL divergence of logits\nto exact sums, nats")
    if cells:
        axes[0].legend(fontsize="x-small")
    _save(figure, path)


def network(folder: pathlib.Path, path: pathlib.Path) -> None:
    """How much faster sums and a decoder are over slow links."""
    records = results.read(folder, "bench_network.jsonl")
    _save(
        plot_bench_network.draw(records, plot_bench_network.Settings().ranks_bytes),
        path,
    )


def wire(path: pathlib.Path, fmt: WireFormat = WireFormat()) -> None:
    """The bytes that one rank sends to another, and one byte of codes."""
    figure = Figure(figsize=(9.2, 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    axis = figure.subplots()
    axis.axis("off")
    axis.set(xlim=(0, 100), ylim=(0, 30))

    def box(left, bottom, width, text, color):
        axis.add_patch(
            Rectangle((left, bottom), width, 6, facecolor=color, edgecolor="black")
        )
        axis.text(
            left + width / 2, bottom + 3, text, ha="center", va="center", fontsize=9
        )

    codes, scale = "#cfe2f3", "#fce5cd"
    axis.text(0, 27.5, "one payload, uint8, for one rank", fontsize=9)
    for left, text in ((0, "codes of block 0"), (20, "block 1"), (40, "...")):
        box(left, 20, 20, text, codes)
    for left, text in ((60, "scale 0"), (70, "scale 1"), (80, "...")):
        box(left, 20, 10, text, scale)
    axis.text(10, 17.6, f"{fmt.code_bytes} bytes", ha="center", fontsize=8)
    axis.text(65, 17.6, "2 bytes, bfloat16", ha="center", fontsize=8)
    half = fmt.block_size // 2
    axis.text(0, 11.5, f"byte j of a block's {fmt.bits}-bit codes", fontsize=9)
    box(0, 4, 22, f"code {half}+j (high)", codes)
    box(22, 4, 22, "code j (low)", codes)
    axis.text(0, 1.6, "bit 7", fontsize=8)
    axis.text(44, 1.6, "bit 0", ha="right", fontsize=8)
    axis.text(
        50, 7,
        f"j = 0 .. {half - 1}: two contiguous halves of the block,\n"
        "one in the low nibbles, one in the high ones",
        va="center", fontsize=9,
    )  # fmt: skip
    _save(figure, path)


def write_all(folder: pathlib.Path, out: pathlib.Path) -> None:
    """Writes every picture; an empty plot where nothing was measured."""
    depth(folder, out / "depth.svg")
    ranks(folder, out / "ranks.svg")
    formats(folder, out / "formats.svg")
    frontier(folder, out / "frontier.svg")
    network(folder, out / "network.svg")
    wire(out / "wire.svg")


if __name__ == "__main__":
    write_all(results.RESULTS, pathlib.Path(sys.argv[1]))
